//! Saves and restores addresses and routes of a link as the kernel's own messages, with all attributes and in all
//! tables.

use std::io;

use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_REPLACE};

use super::raw_message::{ParsedMessage, dump, request};
use crate::error::NetworkFault;

/// Sizes of `struct ifaddrmsg`, `struct rtmsg` and `struct rtnexthop`.
const ADDRESS: usize = 8;
const ROUTE: usize = 12;
const HOP: usize = 8;

// linux/if_addr.h, linux/rtnetlink.h
const IFA_LOCAL: u16 = 2;
const IFA_CACHEINFO: u16 = 6;
const IFA_FLAGS: u16 = 8;
const IFA_PROTO: u16 = 11;
const IFAPROT_KERNEL_LL: u8 = 3;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_PRIORITY: u16 = 6;
const RTA_PREFSRC: u16 = 7;
const RTA_MULTIPATH: u16 = 9;
const RTA_CACHEINFO: u16 = 12;
const RTA_EXPIRES: u16 = 23;
const RTA_UID: u16 = 25;
const RTA_NH_ID: u16 = 30;
const RTM_F_CLONED: u32 = 0x200;
/// Route flags that a request may set: `RTNH_F_PERVASIVE` and `RTNH_F_ONLINK`. The kernel only reports the others.
const SETTABLE_FLAGS: u8 = 2 | 4;

const FAMILIES: [u8; 2] = [libc::AF_INET as u8, libc::AF_INET6 as u8];

/// Addresses of a link, without the link-local ones of IPv6 that the kernel creates.
pub(crate) fn addresses(index: u32) -> Result<Vec<Vec<u8>>, NetworkFault> {
    let mut found = Vec::new();
    for family in FAMILIES {
        let mut ask = vec![0; ADDRESS];
        ask[0] = family;
        let all = dump(libc::RTM_GETADDR, ask).map_err(NetworkFault::kernel("reading addresses"))?;
        let parts = all
            .iter()
            .filter_map(|message| ParsedMessage::of(message, ADDRESS));
        let own = parts.filter(|parts| {
            let of = parts.header.get(4..8) == Some(&index.to_ne_bytes()[..]);
            of && parts.value(IFA_PROTO) != Some(vec![IFAPROT_KERNEL_LL])
        });
        found.extend(own.map(|parts| deprecated(parts).bytes()));
    }
    Ok(found)
}

/// The kernel reports a deprecated address by a flag, and accepts it by a preferred lifetime of zero.
fn deprecated(mut parts: ParsedMessage) -> ParsedMessage {
    let flags = parts.number(IFA_FLAGS).unwrap_or_default();
    if let Some(mut times) = parts.value(IFA_CACHEINFO).filter(|times| times.len() >= 4)
        && flags & libc::IFA_F_DEPRECATED != 0
    {
        times[..4].fill(0);
        parts.set(IFA_CACHEINFO, times);
    }
    parts
}

/// Removes saved addresses that still exist.
pub(crate) fn remove_addresses(name: &str, kept: &[Vec<u8>]) -> Result<(), NetworkFault> {
    for message in kept {
        match request(libc::RTM_DELADDR, 0, message.clone()) {
            Err(e) if e.raw_os_error() != Some(libc::EADDRNOTAVAIL) => {
                return Err(NetworkFault::kernel(format!("removing an address from {name}"))(
                    e,
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Adds saved addresses. IPv6 addresses skip duplicate address detection at first, since routes cannot use a tentative
/// address; [`restore_address_flags`] removes that flag.
pub(crate) fn add_addresses(name: &str, kept: &[Vec<u8>]) -> Result<(), NetworkFault> {
    let mut done = Ok(());
    for message in kept {
        let added = match request(libc::RTM_NEWADDR, NLM_F_CREATE, replay_address(message)) {
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            added => added.map_err(NetworkFault::kernel(format!("adding an address to {name}"))),
        };
        done = done.and(added);
    }
    done
}

/// Restores the flags of the IPv6 addresses.
pub(crate) fn restore_address_flags(name: &str, kept: &[Vec<u8>]) -> Result<(), NetworkFault> {
    let changed = kept.iter().filter(|message| with_nodad(message).is_some());
    changed.cloned().try_for_each(|message| {
        request(libc::RTM_NEWADDR, NLM_F_REPLACE, message)
            .map_err(NetworkFault::kernel(format!("changing an address of {name}")))
    })
}

/// The request that adds a saved address.
pub(crate) fn replay_address(message: &[u8]) -> Vec<u8> {
    with_nodad(message).unwrap_or_else(|| message.to_vec())
}

/// The message with `IFA_F_NODAD` if it is an IPv6 address without it.
fn with_nodad(message: &[u8]) -> Option<Vec<u8>> {
    let mut parts = ParsedMessage::of(message, ADDRESS)?;
    let flags = parts.number(IFA_FLAGS)?;
    if parts.header[0] != libc::AF_INET6 as u8 || flags & libc::IFA_F_NODAD != 0 {
        return None;
    }
    parts.set(IFA_FLAGS, (flags | libc::IFA_F_NODAD).to_ne_bytes().to_vec());
    Some(parts.bytes())
}

/// Routes that are lost with a link: those through it, and those with a source in `addresses`.
pub(crate) fn routes(index: u32, addresses: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, NetworkFault> {
    let own: Vec<_> = addresses
        .iter()
        .filter_map(|message| ParsedMessage::of(message, ADDRESS)?.value(IFA_LOCAL))
        .collect();
    let mut found = Vec::new();
    for family in FAMILIES {
        let mut ask = vec![0; ROUTE];
        ask[0] = family;
        let all = dump(libc::RTM_GETROUTE, ask).map_err(NetworkFault::kernel("reading routes"))?;
        for message in all {
            let Some(parts) = ParsedMessage::of(&message, ROUTE).filter(|parts| !is_cloned(parts)) else {
                continue;
            };
            let from_own = parts
                .value(RTA_PREFSRC)
                .is_some_and(|source| own.contains(&source));
            if from_own || links(&parts).contains(&index) {
                found.extend(replay_requests(parts));
            }
        }
    }
    Ok(found)
}

/// The requests that restore a route.
#[cfg(feature = "testing")]
pub(crate) fn replay(message: &[u8]) -> Vec<Vec<u8>> {
    let found = ParsedMessage::of(message, ROUTE).filter(|parts| !is_cloned(parts));
    found.map_or_else(Vec::new, |parts| {
        let _ = links(&parts);
        replay_requests(parts)
    })
}

/// Requests that create a route again, without read-only attributes. One request per next hop in IPv6, which accepts a
/// multipath route only if it has no route to that destination.
fn replay_requests(mut parts: ParsedMessage) -> Vec<Vec<u8>> {
    parts.header[8] &= SETTABLE_FLAGS;
    parts.header[9..12].fill(0);
    if let Some(seconds) = seconds_left(&parts) {
        parts.set(RTA_EXPIRES, seconds.to_ne_bytes().to_vec());
    }
    parts.remove(&[RTA_CACHEINFO, RTA_UID, RTA_NH_ID]);
    let Some(hops) = parts.value(RTA_MULTIPATH) else {
        return vec![parts.bytes()];
    };
    let hops = hops_of(&hops).into_iter().map(|hop| {
        let mut hop = hop.to_vec();
        hop[2] &= SETTABLE_FLAGS;
        hop
    });
    let alternatives: Vec<Vec<u8>> = match parts.header[0] == libc::AF_INET6 as u8 {
        true => hops.collect(),
        false => vec![hops.collect::<Vec<_>>().concat()],
    };
    let with = |hops| {
        let mut parts = parts.clone();
        parts.set(RTA_MULTIPATH, hops);
        parts.bytes()
    };
    alternatives.into_iter().map(with).collect()
}

/// Remaining lifetime of an IPv6 route, such as one from a router advertisement. Routes without one last as long as
/// their address.
fn seconds_left(route: &ParsedMessage) -> Option<u32> {
    let times = route.value(RTA_CACHEINFO)?;
    let hundredths = i32::from_ne_bytes(times.get(8..12)?.try_into().ok()?);
    let is_6 = route.header[0] == libc::AF_INET6 as u8;
    u32::try_from(hundredths / 100)
        .ok()
        .filter(|seconds| is_6 && *seconds > 0)
}

fn hops_of(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut hops = Vec::new();
    while bytes.len() >= HOP {
        let length = usize::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
        let aligned = length.next_multiple_of(4);
        let Some((hop, rest)) = bytes.split_at_checked(aligned).filter(|_| length >= HOP) else {
            break;
        };
        hops.push(hop);
        bytes = rest;
    }
    hops
}

/// Output interfaces of a route.
fn links(route: &ParsedMessage) -> Vec<u32> {
    let hops = route.value(RTA_MULTIPATH).unwrap_or_default();
    let of = |hop: &[u8]| u32::from_ne_bytes([hop[4], hop[5], hop[6], hop[7]]);
    let hops = hops_of(&hops).into_iter().map(of);
    route.number(RTA_OIF).into_iter().chain(hops).collect()
}

fn is_cloned(route: &ParsedMessage) -> bool {
    let flags = [8, 9, 10, 11].map(|byte| route.header[byte]);
    u32::from_ne_bytes(flags) & RTM_F_CLONED != 0
}

fn is_kernels(route: &[u8]) -> bool {
    route.get(5) == Some(&libc::RTPROT_KERNEL)
}

/// True for a route to link-local addresses, which the kernel adds and removes itself.
fn is_link_local(route: &[u8]) -> bool {
    let destination = ParsedMessage::of(route, ROUTE).and_then(|parts| parts.value(RTA_DST));
    destination.is_some_and(|to| to.len() == 16 && to.starts_with(&[0xfe, 0x80]))
}

/// True if both messages are the same route of the same protocol, whatever other attributes have changed.
pub(crate) fn is_same(one: &[u8], other: &[u8]) -> bool {
    let place = |route: &[u8]| {
        let parts = ParsedMessage::of(route, ROUTE)?;
        let header = [0, 1, 3, 4, 5].map(|byte| parts.header[byte]);
        Some((
            header,
            [RTA_DST, RTA_OIF, RTA_PRIORITY].map(|kind| parts.value(kind)),
        ))
    };
    place(one) == place(other)
}

/// Restores saved routes: adds missing ones, and removes routes that the kernel created for the addresses but a CNI
/// plugin had deleted.
pub(crate) fn restore_routes(
    index: u32,
    name: &str,
    kept: &[Vec<u8>],
    addresses: &[Vec<u8>],
) -> Result<(), NetworkFault> {
    let mut left: Vec<_> = kept.iter().filter(|route| !is_kernels(route)).collect();
    let mut done = Ok(());
    // Gateways must be reachable by other routes, so retry failed requests while any succeeds.
    loop {
        let before = left.len();
        let mut refused = Ok(());
        left.retain(|route| {
            let flags = NLM_F_CREATE | NLM_F_APPEND;
            match request(libc::RTM_NEWROUTE, flags, route.to_vec()) {
                Ok(()) => false,
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => false,
                Err(e) => {
                    refused = Err(e);
                    true
                }
            }
        });
        if left.is_empty() {
            break;
        }
        if left.len() == before {
            let what = format!("adding {} of the routes through {name}", left.len());
            done = refused.map_err(NetworkFault::kernel::<io::Error>(what));
            break;
        }
    }
    for route in routes(index, addresses)? {
        let unicast = route.get(7) == Some(&libc::RTN_UNICAST);
        if unicast
            && is_kernels(&route)
            && !is_link_local(&route)
            && !kept.iter().any(|was| is_same(was, &route))
        {
            // The kernel may have removed it already.
            let _ = request(libc::RTM_DELROUTE, 0, route);
        }
    }
    done
}
