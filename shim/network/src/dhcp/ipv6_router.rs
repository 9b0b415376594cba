//! IPv6 router of a masqueraded guest: router advertisements and DHCPv6.

use std::io;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::OwnedFd;

use rustix::net::{RecvFlags, SendFlags, recv, recvfrom, sendto};
use tokio::io::unix::{AsyncFd, TryIoError};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::{router_advert, v6};

pub(super) struct Ipv6Router {
    dhcp: AsyncFd<OwnedFd>,
    icmp: AsyncFd<OwnedFd>,
    advertise: Interval,
    server: v6::Dhcpv6Responder,
    bridge: u32,
}

/// Packets that at most one advertisement answers.
const BATCH: usize = 64;

/// Waits for one event and handles it. Waits forever without a router.
pub(super) async fn serve_once(router: &mut Option<Ipv6Router>) -> io::Result<()> {
    match router {
        Some(router) => router.serve().await,
        None => std::future::pending().await,
    }
}

impl Ipv6Router {
    pub(super) fn new(
        dhcp: AsyncFd<OwnedFd>,
        icmp: AsyncFd<OwnedFd>,
        server: v6::Dhcpv6Responder,
        bridge: u32,
    ) -> Ipv6Router {
        let mut advertise = interval(router_advert::ADVERT_INTERVAL);
        advertise.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ipv6Router {
            dhcp,
            icmp,
            advertise,
            server,
            bridge,
        }
    }

    async fn serve(&mut self) -> io::Result<()> {
        tokio::select! {
            ready = self.dhcp.readable() => {
                unless_empty(ready?.try_io(|socket| self.answer(socket.get_ref())))
            }
            ready = self.icmp.readable() => {
                unless_empty(ready?.try_io(|socket| self.handle_icmpv6(socket.get_ref())))
            }
            _ = self.advertise.tick() => {
                self.advertise();
                Ok(())
            }
        }
    }

    /// Reads one DHCPv6 packet and replies if it is for this server.
    fn answer(&self, socket: &OwnedFd) -> io::Result<()> {
        let mut buffer = [0; v6::MAX_PACKET + 1];
        let (_, length, from) = recvfrom(socket, &mut buffer[..], RecvFlags::empty())?;
        let packet = buffer.get(..length).unwrap_or_default();
        if let (Some(answer), Some(from)) = (self.server.answer(packet), from) {
            log_send_error(sendto(socket, &answer, SendFlags::empty(), &from));
        }
        Ok(())
    }

    /// Reads waiting ICMPv6 packets and sends an advertisement if a router was solicited.
    fn handle_icmpv6(&self, socket: &OwnedFd) -> io::Result<()> {
        let mut buffer = [0; v6::MAX_PACKET + 1];
        let (mut asked, mut taken) = (false, Ok(()));
        for _ in 0..BATCH {
            match recv(socket, &mut buffer[..], RecvFlags::empty()) {
                Ok((_, length)) => asked |= buffer.get(..length).is_some_and(router_advert::is_solicitation),
                Err(e) => {
                    taken = Err(e.into());
                    break;
                }
            }
        }
        if asked {
            self.advertise();
        }
        taken
    }

    /// Sends one advertisement to all nodes, however many solicited it.
    fn advertise(&self) {
        let nodes = SocketAddrV6::new(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), 0, 0, self.bridge);
        let packet = router_advert::advertisement(self.server.lease());
        log_send_error(sendto(&self.icmp, &packet, SendFlags::empty(), &nodes));
    }
}

/// Spurious readiness is not an error.
fn unless_empty(done: Result<io::Result<()>, TryIoError>) -> io::Result<()> {
    done.unwrap_or(Ok(()))
}

/// Clients retry lost packets.
fn log_send_error(sent: rustix::io::Result<usize>) {
    if let Err(e) = sent {
        tracing::debug!("a DHCPv6 answer or an advertisement was not sent: {e}");
    }
}
