//! Devices through which the host reaches other machines.

use std::collections::BTreeSet;
use std::io;

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use crate::error::NetworkFault;

/// Interface indexes of all IPv4 routes in all tables. Replies from a second network or a VPN must be forwarded too.
pub(super) fn all() -> Result<BTreeSet<u32>, NetworkFault> {
    let mut devices = BTreeSet::new();
    dump(|route| devices.extend(devices_of(route))).map_err(NetworkFault::kernel("reading routes"))?;
    Ok(devices)
}

fn devices_of(route: &RouteMessage) -> Vec<u32> {
    if route.header.kind != RouteType::Unicast {
        return Vec::new();
    }
    let devices = route.attributes.iter().flat_map(|attribute| match attribute {
        RouteAttribute::Oif(device) => vec![*device],
        RouteAttribute::MultiPath(hops) => hops.iter().map(|hop| hop.interface_index).collect(),
        _ => Vec::new(),
    });
    devices.collect()
}

fn dump(mut take: impl FnMut(&RouteMessage)) -> io::Result<()> {
    let mut ask = RouteMessage::default();
    ask.header.address_family = AddressFamily::Inet;
    let mut message = NetlinkMessage::from(RouteNetlinkMessage::GetRoute(ask));
    message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.send_to(&bytes, &SocketAddr::new(0, 0), 0)?;
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let message =
                NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).map_err(io::Error::other)?;
            match &message.payload {
                NetlinkPayload::Done(_) => return Ok(()),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(route)) => take(route),
                _ => {}
            }
            let length = (message.header.length as usize).next_multiple_of(4).max(4);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}
