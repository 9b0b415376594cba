//! The device with sockets of the test, and a driver for it.

mod control;
mod data;
mod hostile;
mod lifecycle;
mod snapshot;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use husk_devices::GuestMem;
use husk_devices::virtio::testing::{Driver, Interrupts, WRITE, memory, wait_for};
use husk_devices::virtio::{Activation, ActiveQueue, VirtioDevice};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use crate::config::MULTIPORT;
use crate::{Console, PortSetup};

const DEVICE_READY: u16 = 0;
const DEVICE_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;

/// Entries of each queue.
const SIZE: u16 = 16;
/// Bytes of a receive buffer.
const BUFFER: u32 = 512;
const MESSAGES: u64 = 0x8_0000;
const BUFFERS: u64 = 0x10_0000;
const SENT: u64 = 0x40_0000;
const END: usize = 0x80_0000;

/// Time limit on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Address of queue `index`.
fn ring(index: u16) -> u64 {
    0x1_0000 + 0x1000 * u64::from(index)
}

/// Address of the receive buffer of a head.
fn buffer(queue: u16, head: u16) -> u64 {
    BUFFERS + (u64::from(queue) << 16) + u64::from(head) * 0x1000
}

/// Waits long enough for the worker to misbehave.
fn settle() {
    thread::sleep(Duration::from_millis(30));
}

/// A message of the driver or the device.
fn message(id: u32, event: u16, value: u16) -> Vec<u8> {
    [&id.to_le_bytes()[..], &event.to_le_bytes(), &value.to_le_bytes()].concat()
}

type Opens = Arc<Mutex<Vec<(String, bool)>>>;

struct Guest {
    mem: GuestMem,
    interrupts: Arc<Interrupts>,
    console: Console,
    /// Ends of the host, by port, from port 1.
    hosts: Vec<UnixStream>,
    /// What the host was told about the guest.
    opens: Opens,
    /// By index.
    queues: Vec<Driver>,
}

impl Guest {
    /// A device with this many ports, called `port1` and so on, and a driver that has not said anything.
    fn new(ports: usize) -> Self {
        let (mut hosts, mut setups) = (Vec::new(), Vec::new());
        for number in 1..=ports {
            let (host, stream) = UnixStream::pair().unwrap();
            host.set_read_timeout(Some(TIMEOUT)).unwrap();
            host.set_write_timeout(Some(TIMEOUT)).unwrap();
            hosts.push(host);
            setups.push(PortSetup {
                name: format!("port{number}"),
                stream: stream.into(),
            });
        }
        let opens = Opens::default();
        let told = Arc::clone(&opens);
        let on_guest_open = move |name: &str, open| told.lock().unwrap().push((name.to_owned(), open));
        let mut guest = Self {
            mem: memory(&[(0, END)]),
            interrupts: Interrupts::new(),
            console: Console::new(setups, Arc::new(on_guest_open)).unwrap(),
            hosts,
            opens,
            queues: Vec::new(),
        };
        guest.connect();
        guest
    }

    /// With a driver that has opened every port.
    fn open(ports: usize) -> Self {
        let mut guest = Self::new(ports);
        guest.open_all();
        guest
    }

    /// A new driver, with new queues and buffers for messages of the device.
    fn connect(&mut self) {
        self.console.reset();
        self.interrupts = Interrupts::new();
        let count = self.console.queue_max_sizes().len() as u16;
        self.queues = (0..count)
            .map(|index| {
                let zeroes = vec![0; 0x1000];
                self.put(ring(index), &zeroes);
                Driver::new(&self.mem, index, SIZE, ring(index))
            })
            .collect();
        let queues = self.queues.iter().map(|queue| queue.queue(false)).collect();
        self.activate(queues, MULTIPORT);
        self.offer(2, SIZE);
    }

    fn activate(&mut self, queues: Vec<ActiveQueue>, features: u64) {
        self.console
            .activate(Activation {
                mem: self.mem.clone(),
                features,
                queues,
                interrupt: Arc::clone(&self.interrupts) as _,
            })
            .unwrap();
    }

    /// Stops and restarts the device.
    fn pause(&mut self) {
        let queues = self.console.quiesce().unwrap();
        self.activate(queues, MULTIPORT);
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.mem.memory().write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn get(&self, at: u64, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.mem
            .memory()
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }

    /// Adds receive buffers to a queue.
    fn offer(&mut self, queue: u16, count: u16) {
        let driver = &mut self.queues[usize::from(queue)];
        for _ in 0..count {
            let at = buffer(queue, driver.next_head());
            driver.add(&[(at, BUFFER, WRITE)]);
        }
        if driver.wants_kick(false, 0) {
            driver.kick();
        }
    }

    /// The content of the next used buffer of a receive queue. Offers a new one.
    fn next(&mut self, queue: u16) -> Vec<u8> {
        let (head, len) = self.queues[usize::from(queue)].wait();
        let bytes = self.get(buffer(queue, head), len);
        self.offer(queue, 1);
        bytes
    }

    /// The next control message of the device.
    fn told(&mut self) -> Vec<u8> {
        self.next(2)
    }

    fn expect(&mut self, messages: &[Vec<u8>]) {
        for expected in messages {
            assert_eq!(self.told(), *expected);
        }
    }

    /// Sends bytes on the control queue, and waits until the device has them.
    fn tell_bytes(&mut self, bytes: &[u8]) {
        self.put(MESSAGES, bytes);
        let driver = &mut self.queues[3];
        driver.add(&[(MESSAGES, bytes.len() as u32, 0)]);
        driver.kick();
        assert_eq!(driver.wait().1, 0);
    }

    fn tell(&mut self, id: u32, event: u16, value: u16) {
        self.tell_bytes(&message(id, event, value));
    }

    /// Sets up every port, as a driver does, and opens it.
    fn open_all(&mut self) {
        let ports = self.hosts.len() as u16;
        self.tell(u32::MAX, DEVICE_READY, 1);
        for number in 1..=u32::from(ports) {
            self.expect(&[message(number, DEVICE_ADD, 1)]);
        }
        for number in 1..=u32::from(ports) {
            self.tell(number, PORT_READY, 1);
            let name = [message(number, PORT_NAME, 1), format!("port{number}").into()].concat();
            self.expect(&[name, message(number, PORT_OPEN, 1)]);
            self.offer(2 + 2 * number as u16, SIZE);
            self.tell(number, PORT_OPEN, 1);
        }
    }

    /// Adds a transmit buffer of a port, in two parts. Returns its head.
    fn transmit(&mut self, port: usize, bytes: &[u8]) -> u16 {
        let driver = &self.queues[3 + 2 * port];
        let at = SENT + ((port as u64) << 20) + u64::from(driver.next_head()) * 0x8000;
        self.put(at, bytes);
        let (half, len) = (bytes.len() as u32 / 2, bytes.len() as u32);
        let driver = &mut self.queues[3 + 2 * port];
        let head = driver.add(&[(at, half, 0), (at + u64::from(half), len - half, 0)]);
        driver.kick();
        head
    }

    /// Bytes from the guest.
    fn heard(&mut self, port: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.hosts[port - 1].read_exact(&mut bytes).unwrap();
        bytes
    }

    /// What the host was told since the last call.
    fn opens(&self) -> Vec<(String, bool)> {
        std::mem::take(&mut self.opens.lock().unwrap())
    }

    fn broken(&self) -> String {
        wait_for("a reset", || self.interrupts.reset())
    }
}

/// Bytes that differ from their neighbours.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed)
        .collect()
}
