//! Whether a pod's device is one that a guest can have. It is asked before anything is changed.

use netlink_packet_route::link::LinkLayerType;

use super::error::Fault;
use super::interface::Binding;
use super::mac::MacAddr;
use super::netlink::{Link, Netlink};
use super::nic::PodNic;

/// What the kernel allows a tap: 65535 bytes with Ethernet's header.
const TAP_MTU: u32 = 65521;

fn unfit(nic: &str, why: impl Into<String>) -> Fault {
    Fault::Unfit {
        nic: nic.to_owned(),
        why: why.into(),
    }
}

/// The Ethernet address of a device that has one.
pub(super) fn ethernet(link: &Link) -> Result<MacAddr, Fault> {
    let what = match (link.layer, link.kind.as_str()) {
        (LinkLayerType::Ether, _) => link.mac,
        (LinkLayerType::Loopback, _) => {
            return Err(unfit(&link.name, "is the loopback device: name another one"));
        }
        _ => None,
    };
    what.ok_or_else(|| {
        let kind = match link.kind.as_str() {
            "" => format!("{:?}", link.layer).to_lowercase(),
            kind => kind.to_owned(),
        };
        let why =
            format!("is no Ethernet device ({kind}), and a guest takes no other: add one, such as a veth");
        unfit(&link.name, why)
    })
}

/// Refuses a device that the binding can do nothing with.
pub(super) fn check(netlink: &Netlink, nic: &PodNic, binding: &Binding) -> Result<(), Fault> {
    if nic.mtu > TAP_MTU {
        let why = format!(
            "has an MTU of {}, and a tap takes at most {TAP_MTU}: `ip link set {} mtu {TAP_MTU}`",
            nic.mtu, nic.name
        );
        return Err(unfit(&nic.name, why));
    }
    let Some(link) = netlink.at(nic.index)? else {
        return Err(Fault::NoNic(nic.name.clone()));
    };
    let takes_over = *binding == Binding::Bridge;
    if takes_over && link.kind == "bridge" {
        let why = "is a bridge, which cannot be a port of another: use masquerade, or give the pod a veth";
        return Err(unfit(&nic.name, why));
    }
    // One that has addresses of its own is behind a VRF, say, where masquerade leaves it.
    if let Some(index) = link.bridge.filter(|_| takes_over || nic.addresses.is_empty()) {
        let other = netlink.at(index)?;
        let other = other.map_or_else(|| format!("device {index}"), |link| link.name);
        let why = format!(
            "is already a port of {other}: take it from there first (`ip link set {} nomaster`)",
            nic.name
        );
        return Err(unfit(&nic.name, why));
    }
    Ok(())
}
