//! A guest with the kernel's network stack: a namespace whose `eth0` is connected to the guest's end of a tap.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use husk_network::{Netns, PreparedNic};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::ioctl::{Opcode, Setter, Updater, ioctl};

use husk_shim_testing::pod::ip;

type SetInterface<'a> = Updater<'a, { libc::TUNSETIFF as Opcode }, libc::ifreq>;
type SetVnetHeader = Setter<{ libc::TUNSETVNETHDRSZ as Opcode }, libc::c_int>;

pub struct GuestNetns {
    pub netns: Netns,
    ended: Arc<AtomicBool>,
    wire: Option<JoinHandle<()>>,
}

impl GuestNetns {
    /// Its `eth0` is up and has only its MAC address.
    pub fn on(prepared: &PreparedNic) -> GuestNetns {
        let netns = Netns::create().unwrap();
        let inner = netns.run(tap).unwrap();
        ip(&netns, "link set lo up");
        ip(
            &netns,
            &format!("link set eth0 address {} mtu {} up", prepared.mac, prepared.mtu),
        );
        let outer: File = prepared.taps[0].try_clone().unwrap().into();
        let ended = Arc::new(AtomicBool::new(false));
        let wire = std::thread::spawn({
            let ended = ended.clone();
            move || carry(&inner, &outer, &ended)
        });
        GuestNetns {
            netns,
            ended,
            wire: Some(wire),
        }
    }

    pub fn udhcpc(&self) -> Command {
        // A fixed file: a script written here could still be open for writing in a process that another test forks, and
        // exec would fail.
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/network/udhcpc.sh");
        let mut command = Command::new("busybox");
        command
            .args("udhcpc -i eth0 -n -t 60 -T 1 -O staticroutes -O mtu -s".split(' '))
            .arg(script);
        command
    }

    /// Runs udhcpc until it has a lease.
    pub fn run_udhcpc(&self) {
        let mut command = self.udhcpc();
        command.args(["-q", "-f"]);
        let output = self.netns.run(|| command.output()).unwrap();
        let output = output.unwrap_or_else(|e| panic!("this test needs the command busybox: {e}"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "busybox udhcpc: {said}");
    }
}

impl Drop for GuestNetns {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = self.wire.take().unwrap().join();
    }
}

fn tap() -> File {
    let tap = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .unwrap();
    // SAFETY: ifreq consists of integers and a union of them, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"eth0") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: both requests get a value of the type that they take.
    unsafe {
        ioctl(&tap, SetInterface::new(&mut request)).unwrap();
        ioctl(&tap, SetVnetHeader::new(12)).unwrap();
    }
    tap
}

/// Forwards frames in both directions, with their headers, until `ended`.
fn carry(inner: &File, outer: &File, ended: &AtomicBool) {
    let mut buffer = vec![0; 70_000];
    let limit = Timespec {
        tv_sec: 0,
        tv_nsec: 50_000_000,
    };
    while !ended.load(Ordering::Relaxed) {
        let readable = |file| PollFd::new(file, PollFlags::IN);
        let _ = poll(&mut [readable(inner), readable(outer)], Some(&limit));
        for (mut from, mut to) in [(inner, outer), (outer, inner)] {
            while let Ok(length) = from.read(&mut buffer) {
                // Frames that do not fit are dropped.
                let _ = to.write(&buffer[..length]);
            }
        }
    }
}
