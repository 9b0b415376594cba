//! A tap in a network namespace of its own, and the host's end of it.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use libc::c_int;

/// Time limit for a frame on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Local experimental Ethertype 1 (IEEE 802): nothing in the kernel sends it.
pub const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

const INSIDE: &str = "HUSK_TEST_NETNS";
const TUN: &str = "/dev/net/tun";
const TAP: &str = "tap0";

/// Runs the test `name`, whose body is `body`, once more in a namespace of its own, as its root. An ordinary user needs
/// user namespaces for that.
pub fn isolated(name: &str, body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    if let Err(e) = open_tun() {
        panic!("the tests of virtio-net on a tap need {TUN}: {e}");
    }
    // SAFETY: geteuid has no preconditions, and cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    let namespaces = if root {
        &["--net"][..]
    } else {
        &["--net", "--map-root-user"]
    };
    let output = Command::new("unshare")
        .args(namespaces)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--include-ignored"])
        .env(INSIDE, "1")
        .output()
        .expect("these tests need the command unshare, of util-linux");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(
        out.contains("running 1 test"),
        "the tests of virtio-net on a tap need root or user namespaces: {}",
        err.trim()
    );
    assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
}

fn open_tun() -> io::Result<File> {
    File::options().read(true).write(true).open(TUN)
}

fn check(result: c_int) -> c_int {
    assert!(result >= 0, "{}", io::Error::last_os_error());
    result
}

fn request(name: &str, flags: c_int) -> libc::ifreq {
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: flags as i16,
        },
    };
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte as _;
    }
    request
}

/// A tap with as many queues, up.
pub fn tap(queues: usize) -> Vec<OwnedFd> {
    tap_named(TAP, queues)
}

/// The same, of that name.
pub fn tap_named(name: &str, queues: usize) -> Vec<OwnedFd> {
    let multi = if queues > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    let queue = |_| {
        let tun = open_tun().expect(TUN);
        let request = request(name, libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | multi);
        // SAFETY: the kernel reads one ifreq, and `request` is one that lives through the call.
        check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as _, &raw const request) });
        tun.into()
    };
    let queues = (0..queues).map(queue).collect();
    // Keep the kernel from sending packets of its own and from checking forwarded ones.
    let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
    let socket = socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
    let request = request(name, libc::IFF_UP);
    // SAFETY: the kernel reads one ifreq, and `request` is one that lives through the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) });
    queues
}

fn socket(domain: c_int, kind: c_int, protocol: c_int) -> OwnedFd {
    // SAFETY: socket takes integers; its result, once checked, is an open descriptor with no other owner.
    unsafe { OwnedFd::from_raw_fd(check(libc::socket(domain, kind, protocol))) }
}

/// Frames the kernel kept from the guest, as the tap counts them.
pub fn filtered() -> u64 {
    let table = fs::read_to_string("/proc/self/net/dev").unwrap();
    let line = table
        .lines()
        .find(|line| line.trim_start().starts_with(TAP))
        .unwrap();
    line.split_whitespace().nth(12).unwrap().parse().unwrap()
}

/// The host's packet socket on the tap, with the kernel's virtio header of ten bytes.
pub struct Wire(OwnedFd);

impl Wire {
    pub fn new() -> Self {
        let all = (libc::ETH_P_ALL as u16).to_be();
        let fd = socket(libc::AF_PACKET, libc::SOCK_RAW, all.into());
        let name = CString::new(TAP).unwrap();
        let set = |level, option, value: &[u8]| {
            // SAFETY: the kernel reads `value` within its length.
            check(unsafe {
                libc::setsockopt(
                    fd.as_raw_fd(),
                    level,
                    option,
                    value.as_ptr().cast(),
                    value.len() as _,
                )
            });
        };
        const PACKET_VNET_HDR: c_int = 15;
        const PACKET_IGNORE_OUTGOING: c_int = 23;
        set(libc::SOL_PACKET, PACKET_VNET_HDR, &1_i32.to_ne_bytes());
        set(libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, &1_i32.to_ne_bytes());
        let timeout = [TIMEOUT.as_secs().to_ne_bytes(), [0; 8]].concat();
        set(libc::SOL_SOCKET, libc::SO_RCVTIMEO, &timeout);
        // SAFETY: sockaddr_ll is plain integers, for which zeroes are valid.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = libc::AF_PACKET as _;
        address.sll_protocol = all;
        // SAFETY: `name` ends with a NUL, as CString has it.
        address.sll_ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) } as _;
        let len = size_of::<libc::sockaddr_ll>() as _;
        // SAFETY: `address` is a sockaddr_ll of that length, and only read.
        check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) });
        Self(fd)
    }

    /// Sends `frame` to the guest.
    pub fn send(&self, header: [u8; 10], frame: &[u8]) {
        let bytes = [&header[..], frame].concat();
        // SAFETY: the kernel reads `bytes` within their length.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
        assert_eq!(sent, bytes.len() as isize, "{}", io::Error::last_os_error());
    }

    /// The next frame of the guest, with its header.
    pub fn receive(&self) -> ([u8; 10], Vec<u8>) {
        let mut bytes = vec![0; 0x2_0000];
        // SAFETY: the kernel writes into `bytes`, no more than their length.
        let len = unsafe { libc::recv(self.0.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        assert!(len >= 10, "{}", io::Error::last_os_error());
        let header = *bytes.first_chunk().unwrap();
        (header, bytes[10..len as usize].to_vec())
    }
}
