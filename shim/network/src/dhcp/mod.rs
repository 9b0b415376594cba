//! Telling a guest its network: DHCPv4, and for the IPv6 of a masqueraded guest DHCPv6 and router advertisements.
//!
//! One server has one guest and one lease. What it says is worked out without I/O (`v4`, `v6`, `router_advert`); the actor here
//! has the sockets, opened in the pod's namespace, and is a task of the caller's runtime.

mod frame;
mod ipv6_router;
mod option_filter;
mod options;
mod resolv_conf;
mod router_advert;
mod socket;
mod v4;
mod v6;

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

/// A lease that is renewed within a VM's life. A renewal goes to the server's address by way of the guest's gateway,
/// so that on a pod's bridge it is seen at the tap only, where looking costs the guest's other frames a little.
const MAX_RENEWED_LEASE: Duration = Duration::from_secs(30 * 86_400);

/// Pause after a socket's error, so that one which stays does not take a processor.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// A running server. It ends when this is dropped.
#[derive(Debug)]
pub struct DhcpServer {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
    leased: watch::Receiver<Option<Ipv4Addr>>,
}

impl DhcpServer {
    /// Starts the server of a prepared interface, as a task of the current runtime. None if there is no lease to give.
    /// Waits for a thread that opens the sockets.
    pub fn start(
        netns: &Netns,
        interface: &Interface,
        prepared: &PreparedNic,
        options: DhcpOptions,
    ) -> Result<Option<DhcpServer>, NetworkError> {
        let fault = NetworkFault::for_interface(&prepared.name);
        let server = || {
            options.check()?;
            let Some(lease) = prepared.lease.clone() else {
                return Ok(None);
            };
            let work = || DhcpSockets::open(interface, prepared, options.lease_time);
            let sockets = netns.run(work).map_err(NetworkFault::Namespace).flatten()?;
            let v6 = prepared
                .lease6
                .map(|lease| v6::Dhcpv6Responder::new(lease, options.resolver.clone()));
            let v4 = v4::Dhcpv4Responder::new(lease, options);
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

    /// The address of IPv4 that the guest has taken; the watch ends with the server.
    #[must_use]
    pub fn leased(&self) -> watch::Receiver<Option<Ipv4Addr>> {
        self.leased.clone()
    }

    /// Waits until it ends by itself, which nothing but a panic makes it.
    pub async fn failed(&mut self) {
        let _ = (&mut self.task).await;
    }

    /// Ends it, and waits until its sockets are closed.
    pub async fn stop(self) {
        let _ = self.stop.send(());
        // One that ended by itself may have been waited for already, which a task allows once.
        if !self.task.is_finished() {
            let _ = self.task.await;
        }
    }
}

/// What is opened inside the namespace.
#[derive(Debug)]
struct DhcpSockets {
    bridge: u32,
    bridge_mac: MacAddr,
    tap: u32,
    received: OwnedFd,
    sender: OwnedFd,
    open_port: Option<OwnedFd>,
    v6: Option<(OwnedFd, OwnedFd)>,
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
            Ok(DhcpSockets {
                bridge: index,
                bridge_mac: bridge.mac.unwrap_or(MacAddr::GATEWAY),
                tap,
                received: socket::receiver(if at_tap { tap } else { index }, at_tap)?,
                sender: socket::sender()?,
                open_port: (!bridged)
                    .then(|| socket::open_port(&devices.bridge))
                    .transpose()?,
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

/// The actor.
struct DhcpTask {
    bridge_mac: MacAddr,
    tap: u32,
    received: AsyncFd<OwnedFd>,
    sender: OwnedFd,
    _open_port: Option<OwnedFd>,
    v4: v4::Dhcpv4Responder,
    v6: Option<Ipv6Router>,
    leased: watch::Sender<Option<Ipv4Addr>>,
}

impl DhcpTask {
    fn new(
        sockets: DhcpSockets,
        v4: v4::Dhcpv4Responder,
        v6: Option<v6::Dhcpv6Responder>,
    ) -> Result<DhcpTask, NetworkFault> {
        let poll = |fd| readable(fd).map_err(NetworkFault::kernel("waiting for the DHCP server's sockets"));
        let v6 = match (sockets.v6, v6) {
            (Some((dhcp, icmp)), Some(server)) => {
                Some(Ipv6Router::new(poll(dhcp)?, poll(icmp)?, server, sockets.bridge))
            }
            _ => None,
        };
        Ok(DhcpTask {
            bridge_mac: sockets.bridge_mac,
            tap: sockets.tap,
            received: poll(sockets.received)?,
            sender: sockets.sender,
            _open_port: sockets.open_port,
            v4,
            v6,
            leased: watch::Sender::new(None),
        })
    }

    async fn serve(mut self) {
        loop {
            tokio::select! {
                ready = self.received.readable() => {
                    let failed = match ready {
                        Ok(mut ready) => {
                            let read = ready.try_io(|socket| self.answer(socket.get_ref()));
                            matches!(read, Ok(Err(_)))
                        }
                        Err(_) => true,
                    };
                    if failed {
                        tokio::time::sleep(ERROR_PAUSE).await;
                    }
                }
                done = ipv6_router::serve_once(&mut self.v6) => {
                    if done.is_err() {
                        tokio::time::sleep(ERROR_PAUSE).await;
                    }
                }
            }
        }
    }

    /// Takes one frame, and answers it if it is its guest's.
    fn answer(&self, socket: &OwnedFd) -> io::Result<()> {
        let mut buffer = [0; 2048];
        let (_, length) = recv(socket, &mut buffer[..], RecvFlags::TRUNC)?;
        let lease = self.v4.lease();
        let asked = buffer.get(..length).and_then(frame::to_server);
        let Some(answer) = asked
            .filter(|(source, _)| *source == lease.mac)
            .and_then(|(_, packet)| self.v4.answer(packet))
        else {
            return Ok(());
        };
        let from = (self.bridge_mac, lease.server);
        if let Some(frame) = frame::to_client(from, (lease.mac, answer.to), &answer.packet) {
            // By the tap itself, so that no other port of the bridge sees it. What is lost the guest asks for again.
            if let Err(e) = socket::send(&self.sender, self.tap, &frame) {
                tracing::debug!("a DHCP answer was not sent: {e}");
            } else if answer.leases {
                let address = Some(lease.address.addr());
                self.leased
                    .send_if_modified(|leased| std::mem::replace(leased, address) != address);
            }
        }
        Ok(())
    }
}

fn readable(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open, and the same file, for as long as the AsyncFd that owns it here.
    let polled = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) };
    polled.map_err(|refused| refused.into_parts().1)
}
