//! Sockets of the DHCP server. They belong to the namespace of the thread that opens them.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::sockopt;
use rustix::net::{
    AddressFamily, Protocol, SendFlags, SocketFlags, SocketType, bind, ipproto, sendto, socket_with,
};

/// `SKF_AD_OFF + SKF_AD_VLAN_TAG_PRESENT` of linux/filter.h.
const SKF_AD_VLAN_TAG_PRESENT: u32 = (-0x1000i32 + 48) as u32;

/// Filter for untagged IPv4 frames to UDP port 67. Without it the kernel would copy every frame of a busy guest and
/// wake the server.
const TO_DHCP_SERVER: [libc::sock_filter; 11] = [
    load(libc::BPF_B | libc::BPF_ABS, SKF_AD_VLAN_TAG_PRESENT),
    unless(0, 8),
    load(libc::BPF_H | libc::BPF_ABS, 12),
    unless(0x0800, 6),
    load(libc::BPF_B | libc::BPF_ABS, 23),
    unless(17, 4),
    load(libc::BPF_B | libc::BPF_MSH, 14),
    load(libc::BPF_H | libc::BPF_IND, 16),
    unless(67, 1),
    accept(u32::MAX),
    accept(0),
];

const fn load(what: u32, at: u32) -> libc::sock_filter {
    let class = if what & 0xe0 == libc::BPF_MSH {
        libc::BPF_LDX
    } else {
        libc::BPF_LD
    };
    libc::sock_filter {
        code: (class | what) as u16,
        jt: 0,
        jf: 0,
        k: at,
    }
}

/// Skips `skip` instructions if the accumulator is not `value`.
const fn unless(value: u32, skip: u8) -> libc::sock_filter {
    libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: 0,
        jf: skip,
        k: value,
    }
}

const fn accept(bytes: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: bytes,
    }
}

/// A packet socket that sends frames through any device and receives none.
pub(super) fn sender() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?)
}

/// A packet socket that receives frames to a DHCP server from a device: those that reach the namespace's own stack or,
/// with `all`, also those that a bridge takes from the device.
pub(super) fn receiver(device: u32, all: bool) -> io::Result<OwnedFd> {
    let socket = sender()?;
    // The filter must be in place before bind, which starts reception.
    let filter = libc::sock_fprog {
        len: TO_DHCP_SERVER.len() as u16,
        filter: TO_DHCP_SERVER.as_ptr().cast_mut(),
    };
    set_option(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)?;
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, &1i32)?;
    let protocol = if all { libc::ETH_P_ALL } else { libc::ETH_P_IP };
    bind(&socket, &LinkAddress::new(device, protocol as u16))?;
    Ok(socket)
}

/// Sends a frame through a device.
pub(super) fn send(socket: impl AsFd, device: u32, frame: &[u8]) -> io::Result<()> {
    sendto(socket, frame, SendFlags::empty(), &LinkAddress::new(device, 0))?;
    Ok(())
}

/// Binds UDP port 67 without reading from it, so that the kernel does not reject packets that the packet socket
/// receives with "port unreachable".
pub(super) fn open_port(device: &str) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_recv_buffer_size(&socket, 0)?;
    bind_to_device(&socket, device)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 67))?;
    Ok(socket)
}

/// UDP socket of a DHCPv6 server.
pub(super) fn dhcpv6(device: &str, index: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET6, SocketType::DGRAM, flags, None)?;
    sockopt::set_ipv6_v6only(&socket, true)?;
    bind_to_device(&socket, device)?;
    bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 547, 0, 0))?;
    // All_DHCP_Relay_Agents_and_Servers.
    sockopt::set_ipv6_add_membership(&socket, &Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2), index)?;
    Ok(socket)
}

/// ICMPv6 socket of a router.
pub(super) fn icmpv6(device: &str, index: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let protocol: Option<Protocol> = Some(ipproto::ICMPV6);
    let socket = socket_with(AddressFamily::INET6, SocketType::RAW, flags, protocol)?;
    bind_to_device(&socket, device)?;
    sockopt::set_ipv6_multicast_if(&socket, index)?;
    // Receivers drop neighbour discovery messages with another hop limit.
    sockopt::set_ipv6_multicast_hops(&socket, 255)?;
    sockopt::set_ipv6_unicast_hops(&socket, Some(255))?;
    // All routers.
    sockopt::set_ipv6_add_membership(&socket, &Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2), index)?;
    Ok(socket)
}

/// Address of a packet socket.
struct LinkAddress(libc::sockaddr_ll);

impl LinkAddress {
    fn new(device: u32, protocol: u16) -> LinkAddress {
        // SAFETY: sockaddr_ll consists of integers, for which zeroes are valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol.to_be();
        address.sll_ifindex = device as i32;
        LinkAddress(address)
    }
}

// SAFETY: pointer and length are those of a sockaddr_ll that outlives the call.
unsafe impl SocketAddrArg for LinkAddress {
    unsafe fn with_sockaddr<R>(&self, call: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R) -> R {
        call((&raw const self.0).cast(), size_of_val(&self.0) as SocketAddrLen)
    }
}

fn bind_to_device(socket: &OwnedFd, device: &str) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, device.as_bytes())
}

fn set_option<T: ?Sized>(socket: &OwnedFd, level: i32, name: i32, value: &T) -> io::Result<()> {
    let length = size_of_val(value) as libc::socklen_t;
    // SAFETY: the kernel reads the value within its size. The filter that it may point to is a constant.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const *value).cast(),
            length,
        )
    };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
