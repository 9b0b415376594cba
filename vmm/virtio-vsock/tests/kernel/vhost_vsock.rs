//! The device on the kernel's vhost-vsock, with a driver that knows the packets of one connection.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use husk_devices::GuestMem;
use husk_devices::virtio::testing::{Driver, Interrupts, WRITE, memory, wait_for};
use husk_devices::virtio::{Activation, ActiveQueue, VirtioDevice};
use husk_virtio_vsock::VhostVsock;
use vhost::vhost_kern::vhost_binding::VHOST_VSOCK_SET_GUEST_CID;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vsock::{VMADDR_CID_ANY, VsockListener, VsockStream};

const HOST: u32 = 2;
const SIZE: u16 = 64;
/// Bytes of a receive buffer.
const ROOM: u32 = 4096;
const RECEIVED: u64 = 0x10_0000;
const SENT: u64 = 0x40_0000;
const END: usize = 0x80_0000;
const HEADER: usize = 44;
/// VIRTIO_VSOCK_OP_NAME
const REQUEST: u16 = 1;
const RESPONSE: u16 = 2;
const RST: u16 = 3;
const RW: u16 = 5;
/// Time limit on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, PartialEq)]
struct Packet {
    op: u16,
    /// Port of the host's end, and of the guest's.
    ports: (u32, u32),
    data: Vec<u8>,
}

struct Guest {
    cid: u32,
    mem: GuestMem,
    interrupts: Arc<Interrupts>,
    device: VhostVsock,
    queues: Vec<Driver>,
    sent: u64,
}

fn with_cid(cid: u32) -> std::io::Result<OwnedFd> {
    let opened = File::options().read(true).write(true).open("/dev/vhost-vsock");
    let file = opened.expect("this test needs /dev/vhost-vsock (modprobe vhost_vsock)");
    // SAFETY: the kernel reads one u64.
    let set = unsafe { ioctl_with_ref(&file.as_raw_fd(), VHOST_VSOCK_SET_GUEST_CID(), &u64::from(cid)) };
    match set {
        0 => Ok(file.into()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

impl Guest {
    fn new(cid: u32) -> Self {
        let mut guest = Self {
            cid,
            mem: memory(&[(0, END)]),
            interrupts: Interrupts::new(),
            device: VhostVsock::new(cid, with_cid(cid).unwrap()).unwrap(),
            queues: Vec::new(),
            sent: 0,
        };
        guest.start();
        guest
    }

    /// A new driver that offers receive buffers.
    fn start(&mut self) {
        self.device.reset();
        self.interrupts = Interrupts::new();
        let ring = |index: u16| 0x1_0000 + 0x4000 * u64::from(index);
        let zeroes = vec![0; 0x1_0000];
        self.mem
            .memory()
            .write_slice(&zeroes, GuestAddress(ring(0)))
            .unwrap();
        self.queues = (0..3)
            .map(|index| Driver::new(&self.mem, index, SIZE, ring(index)))
            .collect();
        let queues = self.queues.iter().map(|queue| queue.queue(true)).collect();
        self.activate(queues);
        for slot in 0..SIZE {
            let at = RECEIVED + u64::from(slot) * u64::from(ROOM);
            self.queues[0].add(&[(at, ROOM, WRITE)]);
        }
        self.queues[0].kick();
    }

    fn activate(&mut self, queues: Vec<ActiveQueue>) {
        let activation = Activation {
            mem: self.mem.clone(),
            features: self.device.features(),
            queues,
            interrupt: Arc::clone(&self.interrupts) as _,
        };
        self.device.activate(activation).unwrap();
    }

    fn send(&mut self, packet: &Packet) {
        let mut bytes = vec![0; HEADER];
        bytes[..8].copy_from_slice(&u64::from(self.cid).to_le_bytes());
        bytes[8..16].copy_from_slice(&u64::from(HOST).to_le_bytes());
        bytes[16..20].copy_from_slice(&packet.ports.1.to_le_bytes());
        bytes[20..24].copy_from_slice(&packet.ports.0.to_le_bytes());
        bytes[24..28].copy_from_slice(&(packet.data.len() as u32).to_le_bytes());
        // A stream.
        bytes[28..30].copy_from_slice(&1_u16.to_le_bytes());
        bytes[30..32].copy_from_slice(&packet.op.to_le_bytes());
        bytes[36..40].copy_from_slice(&0x4_0000_u32.to_le_bytes());
        bytes.extend(&packet.data);
        let at = SENT + self.sent % u64::from(SIZE) * u64::from(ROOM);
        self.sent += 1;
        self.mem.memory().write_slice(&bytes, GuestAddress(at)).unwrap();
        self.queues[1].add(&[(at, bytes.len() as u32, 0)]);
        self.queues[1].kick();
        self.queues[1].wait();
    }

    /// The next packet that is no news about buffers.
    fn receive(&mut self) -> Packet {
        loop {
            let (head, len) = self.queues[0].wait();
            let mut bytes = vec![0; len as usize];
            let at = RECEIVED + u64::from(head) * u64::from(ROOM);
            self.mem
                .memory()
                .read_slice(&mut bytes, GuestAddress(at))
                .unwrap();
            let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let packet = Packet {
                op: u16::from_le_bytes(bytes[30..32].try_into().unwrap()),
                ports: (word(16), word(20)),
                data: bytes[HEADER..].to_vec(),
            };
            if [REQUEST, RESPONSE, RST, RW].contains(&packet.op) {
                return packet;
            }
        }
    }

    /// A connection of the host to port 5000, and its ports.
    fn accept(&mut self) -> (VsockStream, (u32, u32)) {
        let cid = self.cid;
        let connecting: JoinHandle<_> =
            std::thread::spawn(move || VsockStream::connect_with_cid_port(cid, 5000));
        // The end of an earlier connection may come first.
        let ports = loop {
            match self.receive() {
                Packet {
                    op: REQUEST, ports, ..
                } => break ports,
                other => assert_eq!(other.op, RST),
            }
        };
        assert_eq!(ports.1, 5000);
        let response = Packet {
            op: RESPONSE,
            ports,
            data: Vec::new(),
        };
        self.send(&response);
        let stream = connecting.join().unwrap().unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        (stream, ports)
    }

    fn passes_both_ways(&mut self, stream: &mut VsockStream, ports: (u32, u32), text: &[u8]) {
        stream.write_all(text).unwrap();
        let data = text.to_vec();
        assert_eq!(
            self.receive(),
            Packet {
                op: RW,
                ports,
                data: data.clone()
            }
        );
        self.send(&Packet { op: RW, ports, data });
        let mut echo = vec![0; text.len()];
        stream.read_exact(&mut echo).unwrap();
        assert_eq!(echo, text);
    }
}

#[test]
#[ignore = "needs /dev/vhost-vsock"]
fn bytes_pass_both_ways_also_after_a_pause() {
    let mut guest = Guest::new(0x7001);
    let mut cid = [0; 8];
    guest.device.read_config(0, &mut cid);
    assert_eq!(u64::from_le_bytes(cid), 0x7001);
    let (mut stream, ports) = guest.accept();
    guest.passes_both_ways(&mut stream, ports, b"before");
    let queues = guest.device.quiesce().unwrap();
    assert_eq!(queues.len(), 3);
    // News about buffers, from before the pause.
    while guest.queues[0].used().is_some() {}
    stream.write_all(b"while paused").unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(guest.queues[0].used(), None);
    guest.activate(queues);
    assert_eq!(
        guest.receive(),
        Packet {
            op: RW,
            ports,
            data: b"while paused".to_vec()
        }
    );
    guest.passes_both_ways(&mut stream, ports, b"after");
    assert!(guest.interrupts.queue() > 0);
}

#[test]
#[ignore = "needs /dev/vhost-vsock"]
fn the_guest_reaches_a_listener_of_the_host() {
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, 0x7002).unwrap();
    let mut guest = Guest::new(0x7002);
    let ports = (0x7002, 6000);
    guest.send(&Packet {
        op: REQUEST,
        ports,
        data: Vec::new(),
    });
    let (mut stream, _) = listener.accept().unwrap();
    assert_eq!(guest.receive().op, RESPONSE);
    guest.passes_both_ways(&mut stream, ports, b"said to the host");
}

#[test]
#[ignore = "needs /dev/vhost-vsock"]
fn a_new_driver_connects_again() {
    let mut guest = Guest::new(0x7003);
    for _ in 0..3 {
        let (mut stream, ports) = guest.accept();
        guest.passes_both_ways(&mut stream, ports, b"to this driver");
        guest.start();
        // The next driver does not know the connection.
        stream.write_all(b"to the next").unwrap();
        assert_eq!(guest.receive().op, RW);
        guest.send(&Packet {
            op: RST,
            ports,
            data: Vec::new(),
        });
        let ended = stream.read(&mut [0; 8]);
        assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    }
}

#[test]
#[ignore = "needs /dev/vhost-vsock"]
fn the_cid_is_free_with_the_end_of_the_device() {
    let guest = Guest::new(0x7004);
    let error = with_cid(0x7004).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(98), "EADDRINUSE");
    drop(guest);
    wait_for("the CID", || with_cid(0x7004).ok());
}

#[test]
#[ignore = "needs /dev/vhost-vsock"]
fn a_broken_ring_sets_device_needs_reset() {
    let mut guest = Guest::new(0x7005);
    guest.queues[1].offer(SIZE + 1);
    guest.queues[1].kick();
    let reason = wait_for("DEVICE_NEEDS_RESET", || guest.interrupts.reset());
    assert_eq!(reason, "vhost: malformed ring");
}
