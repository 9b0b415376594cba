//! The part of the actor that speaks IPv6: the router that a masqueraded guest has, and its DHCPv6.

use std::io;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::OwnedFd;

use rustix::net::{RecvFlags, SendFlags, recv, recvfrom, sendto};
use tokio::io::unix::AsyncFd;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::{advert, v6};

/// Its sockets, and what it says.
pub(super) struct Router {
    dhcp: AsyncFd<OwnedFd>,
    icmp: AsyncFd<OwnedFd>,
    advertise: Interval,
    server: v6::Server,
    bridge: u32,
}

/// What there is to do.
enum Event {
    Asked,
    Solicited,
    Due,
}

/// Waits for something to do, and does it. Never ends without a router.
pub(super) async fn serve_once(router: &mut Option<Router>) -> io::Result<()> {
    match router {
        Some(router) => {
            let event = router.event().await?;
            router.handle(&event)
        }
        None => std::future::pending().await,
    }
}

impl Router {
    pub(super) fn new(
        dhcp: AsyncFd<OwnedFd>,
        icmp: AsyncFd<OwnedFd>,
        server: v6::Server,
        bridge: u32,
    ) -> Router {
        let mut advertise = interval(advert::EVERY);
        advertise.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Router {
            dhcp,
            icmp,
            advertise,
            server,
            bridge,
        }
    }

    /// Readiness is cleared: whoever handles the event reads the socket until it is empty.
    async fn event(&mut self) -> io::Result<Event> {
        tokio::select! {
            ready = self.dhcp.readable() => {
                ready?.clear_ready();
                Ok(Event::Asked)
            }
            ready = self.icmp.readable() => {
                ready?.clear_ready();
                Ok(Event::Solicited)
            }
            _ = self.advertise.tick() => Ok(Event::Due),
        }
    }

    fn handle(&self, event: &Event) -> io::Result<()> {
        let mut buffer = [0; v6::LARGEST + 1];
        match event {
            Event::Asked => loop {
                let (_, length, from) = match recvfrom(&self.dhcp, &mut buffer[..], RecvFlags::empty()) {
                    Ok(received) => received,
                    Err(e) => return until_empty(e),
                };
                if let (Some(answer), Some(from)) = (self.server.answer(&buffer[..length]), from) {
                    lost(sendto(&self.dhcp, &answer, SendFlags::empty(), &from));
                }
            },
            Event::Solicited => {
                let mut asked = false;
                loop {
                    match recv(&self.icmp, &mut buffer[..], RecvFlags::empty()) {
                        Ok((_, length)) => asked |= advert::is_solicitation(&buffer[..length]),
                        Err(e) => {
                            if asked {
                                self.advertise();
                            }
                            return until_empty(e);
                        }
                    }
                }
            }
            Event::Due => self.advertise(),
        }
        Ok(())
    }

    /// To all nodes: however many ask, one advertisement is for all of them.
    fn advertise(&self) {
        let nodes = SocketAddrV6::new(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), 0, 0, self.bridge);
        let packet = advert::advertisement(self.server.lease());
        lost(sendto(&self.icmp, &packet, SendFlags::empty(), &nodes));
    }
}

fn until_empty(e: rustix::io::Errno) -> io::Result<()> {
    match e {
        rustix::io::Errno::AGAIN | rustix::io::Errno::INTR => Ok(()),
        e => Err(e.into()),
    }
}

/// What is lost the guest asks for again.
fn lost(sent: rustix::io::Result<usize>) {
    if let Err(e) = sent {
        tracing::debug!("a DHCPv6 answer or an advertisement was not sent: {e}");
    }
}
