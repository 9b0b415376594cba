//! DHCPv4 server, and for masqueraded guests with IPv6 a DHCPv6 server and router advertisements.
//!
//! A server has one guest and one lease. `v4`, `v6` and `router_advert` compute replies without I/O. The task here owns
//! the sockets, which are opened in the pod's namespace, and runs on the caller's runtime.

mod frame;
mod ipv6_router;
mod option_filter;
mod options;
mod resolv_conf;
mod router_advert;
mod socket;
#[cfg(feature = "testing")]
pub mod testing;
mod v4;
mod v6;

use std::cell::Cell;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{RecvFlags, recv};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

pub use options::{DhcpOptions, DnsConfig, LONG_LEASE};

use super::error::{NetworkError, NetworkFault};
use super::mac::MacAddr;
use super::netlink::Netlink;
use super::netns::Netns;
use super::{Binding, Interface, PreparedNic};
use ipv6_router::Ipv6Router;

/// Longest lease that a guest renews during a VM's life. A bridged guest sends renewals to the server's address through
/// its gateway, so they are only visible at the tap, where the filter costs all frames some time.
const MAX_RENEWED_LEASE: Duration = Duration::from_secs(30 * 86_400);

/// Pause after a socket error, so that a permanent error does not use a whole CPU.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// A running DHCP server. It stops when this is dropped.
#[derive(Debug)]
pub struct DhcpServer {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
    leased: watch::Receiver<Option<Ipv4Addr>>,
}

impl DhcpServer {
    /// Starts the server of a prepared interface on the current runtime. Returns `None` if there is no lease. Waits for
    /// a thread that opens the sockets.
    pub fn start(
        netns: &Netns,
        interface: &Interface,
        prepared: &PreparedNic,
        options: DhcpOptions,
    ) -> Result<Option<DhcpServer>, NetworkError> {
        let fault = NetworkFault::for_interface(&prepared.name);
        let server = || {
            options.check()?;
            if prepared.lease.is_none() && prepared.lease6.is_none() {
                return Ok(None);
            }
            let work = || DhcpSockets::open(interface, prepared, options.lease_time);
            let sockets = netns.run(work).map_err(NetworkFault::Namespace).flatten()?;
            let v6 = prepared
                .lease6
                .map(|lease| v6::Dhcpv6Responder::new(lease, options.resolver.clone()));
            let v4 = match prepared.lease.clone() {
                Some(lease) => Some(v4::Dhcpv4Responder::new(lease, options)?),
                None => None,
            };
            DhcpTask::new(sockets, v4, v6).map(Some)
        };
        let Some(server) = server().map_err(fault)? else {
            return Ok(None);
        };
        let leased = server.leased.subscribe();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            tokio::select! {
                // An error means that the handle was dropped.
                _ = stopped => {}
                () = server.serve() => {}
            }
        });
        Ok(Some(DhcpServer { stop, task, leased }))
    }

    /// The IPv4 address that the guest has leased. The channel closes when the server ends.
    #[must_use]
    pub fn leased(&self) -> watch::Receiver<Option<Ipv4Addr>> {
        self.leased.clone()
    }

    /// Waits until the server ends by itself, which only a panic causes.
    pub async fn failed(&mut self) {
        let _ = (&mut self.task).await;
    }

    /// Stops the server and waits until its sockets are closed.
    pub async fn stop(self) {
        let _ = self.stop.send(());
        // A finished task may have been awaited by `failed` already, and must not be awaited twice.
        if !self.task.is_finished() {
            let _ = self.task.await;
        }
    }
}

/// Sockets, opened inside the namespace.
#[derive(Debug)]
struct DhcpSockets {
    bridge: u32,
    v4: Option<Dhcpv4Sockets>,
    v6: Option<(OwnedFd, OwnedFd)>,
}

#[derive(Debug)]
struct Dhcpv4Sockets {
    bridge_mac: MacAddr,
    tap: u32,
    received: OwnedFd,
    sender: OwnedFd,
    open_port: Option<OwnedFd>,
}

impl DhcpSockets {
    fn open(
        interface: &Interface,
        prepared: &PreparedNic,
        lease_time: Duration,
    ) -> Result<DhcpSockets, NetworkFault> {
        let netlink = Netlink::open()?;
        let devices = &prepared.devices;
        let bridge = netlink.require_link(&devices.bridge)?;
        let tap = netlink.require_link(&devices.tap)?.index;
        let bridged = interface.binding == Binding::Bridge;
        let at_tap = bridged && lease_time < MAX_RENEWED_LEASE;
        let open = || -> io::Result<DhcpSockets> {
            let index = bridge.index;
            let v4 = || -> io::Result<Dhcpv4Sockets> {
                Ok(Dhcpv4Sockets {
                    bridge_mac: bridge.mac.unwrap_or(MacAddr::GATEWAY),
                    tap,
                    received: socket::receiver(if at_tap { tap } else { index }, at_tap)?,
                    sender: socket::sender()?,
                    open_port: (!bridged)
                        .then(|| socket::open_port(&devices.bridge))
                        .transpose()?,
                })
            };
            Ok(DhcpSockets {
                bridge: index,
                v4: prepared.lease.is_some().then(v4).transpose()?,
                v6: match prepared.lease6 {
                    Some(_) => Some((
                        socket::dhcpv6(&devices.bridge, index)?,
                        socket::icmpv6(&devices.bridge, index)?,
                    )),
                    None => None,
                },
            })
        };
        open().map_err(NetworkFault::kernel(format!(
            "opening the DHCP server's sockets on {}",
            devices.bridge
        )))
    }
}

struct DhcpTask {
    v4: Option<Dhcpv4Server>,
    v6: Option<Ipv6Router>,
    leased: watch::Sender<Option<Ipv4Addr>>,
}

struct Dhcpv4Server {
    bridge_mac: MacAddr,
    tap: u32,
    received: AsyncFd<OwnedFd>,
    sender: OwnedFd,
    _open_port: Option<OwnedFd>,
    responder: v4::Dhcpv4Responder,
    /// A reply could not be sent.
    reported: Cell<bool>,
}

impl DhcpTask {
    fn new(
        sockets: DhcpSockets,
        v4: Option<v4::Dhcpv4Responder>,
        v6: Option<v6::Dhcpv6Responder>,
    ) -> Result<DhcpTask, NetworkFault> {
        let poll = |fd| readable(fd).map_err(NetworkFault::kernel("waiting for the DHCP server's sockets"));
        let v4 = match (sockets.v4, v4) {
            (Some(sockets), Some(responder)) => Some(Dhcpv4Server {
                bridge_mac: sockets.bridge_mac,
                tap: sockets.tap,
                received: poll(sockets.received)?,
                sender: sockets.sender,
                _open_port: sockets.open_port,
                responder,
                reported: Cell::new(false),
            }),
            _ => None,
        };
        let v6 = match (sockets.v6, v6) {
            (Some((dhcp, icmp)), Some(server)) => {
                Some(Ipv6Router::new(poll(dhcp)?, poll(icmp)?, server, sockets.bridge))
            }
            _ => None,
        };
        Ok(DhcpTask {
            v4,
            v6,
            leased: watch::Sender::new(None),
        })
    }

    async fn serve(mut self) {
        loop {
            let done = tokio::select! {
                done = Dhcpv4Server::serve_once(&mut self.v4, &self.leased) => done,
                done = ipv6_router::serve_once(&mut self.v6) => done,
            };
            if done.is_err() {
                tokio::time::sleep(ERROR_PAUSE).await;
            }
            // A socket with packets is always ready. Other tasks run even if the guest sends without pause.
            tokio::task::consume_budget().await;
        }
    }
}

impl Dhcpv4Server {
    /// Waits for one frame and answers it. Waits for ever if there is no server.
    async fn serve_once(
        server: &mut Option<Dhcpv4Server>,
        leased: &watch::Sender<Option<Ipv4Addr>>,
    ) -> io::Result<()> {
        let Some(server) = server else {
            return std::future::pending().await;
        };
        let mut ready = server.received.readable().await?;
        match ready.try_io(|socket| server.answer(socket.get_ref(), leased)) {
            Ok(done) => done,
            // There was no frame.
            Err(_) => Ok(()),
        }
    }

    /// Reads one frame and replies if it is from the guest.
    fn answer(&self, socket: &OwnedFd, leased: &watch::Sender<Option<Ipv4Addr>>) -> io::Result<()> {
        let mut buffer = [0; 2048];
        let (_, length) = recv(socket, &mut buffer[..], RecvFlags::TRUNC)?;
        let answer = buffer
            .get(..length)
            .and_then(|frame| reply(&self.responder, self.bridge_mac, frame));
        if let Some((frame, leases)) = answer {
            // Sent to the tap directly, so that other ports of the bridge do not see it. Clients retry lost packets.
            if let Err(e) = socket::send(&self.sender, self.tap, &frame) {
                // Warn once: a guest that retries must not fill the log.
                if self.reported.replace(true) {
                    tracing::debug!("a DHCP answer was not sent: {e}");
                } else {
                    tracing::warn!("a DHCP answer was not sent: {e}");
                }
            } else if leases {
                let address = Some(self.responder.lease().address.addr());
                leased.send_if_modified(|leased| std::mem::replace(leased, address) != address);
            }
        }
        Ok(())
    }
}

/// The frame that answers a frame of the guest, if it needs one, and whether it grants the lease.
fn reply(server: &v4::Dhcpv4Responder, bridge_mac: MacAddr, frame: &[u8]) -> Option<(Vec<u8>, bool)> {
    let lease = server.lease();
    let (client, packet) =
        frame::to_server(frame).filter(|(source, _)| lease.client.is_none_or(|client| *source == client))?;
    let answer = server.answer(packet)?;
    let (from, to) = ((bridge_mac, lease.server), (client, answer.to));
    let frame = frame::to_client(from, to, &answer.packet)?;
    Some((frame, answer.leases))
}

fn readable(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the AsyncFd owns the OwnedFd, so the descriptor stays open and refers to the same file.
    let polled = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) };
    polled.map_err(|refused| refused.into_parts().1)
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

    use super::super::lease::DhcpLease;
    use super::*;

    #[tokio::test]
    async fn a_guest_that_sends_without_pause_leaves_time_to_other_tasks() {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let (guest, received) = pair();
        let rest = received.try_clone().unwrap();
        // More than tokio lets one task do in one go.
        for number in 0..200 {
            send(&guest, &[number], SendFlags::empty()).unwrap();
        }
        let lease = DhcpLease {
            client: None,
            address: "10.0.2.2/24".parse().unwrap(),
            server: Ipv4Addr::new(10, 0, 2, 1),
            router: None,
            routes: Vec::new(),
            mtu: 1500,
        };
        let sockets = DhcpSockets {
            bridge: 0,
            v4: Some(Dhcpv4Sockets {
                bridge_mac: MacAddr::GATEWAY,
                tap: 0,
                received,
                sender: pair().0,
                open_port: None,
            }),
            v6: None,
        };
        let responder = v4::Dhcpv4Responder::new(lease, DhcpOptions::default()).unwrap();
        let task = DhcpTask::new(sockets, Some(responder), None).unwrap();
        let server = tokio::spawn(task.serve());
        let mut next = [0];
        while next == [0] {
            recv(&rest, &mut next[..], RecvFlags::PEEK).expect("the server has read all frames at once");
            tokio::task::yield_now().await;
        }
        server.abort();
    }
}
