//! A link and its attributes.

use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage};

use crate::mac::MacAddr;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) mac: Option<MacAddr>,
    pub(crate) mtu: u32,
    pub(crate) alias: Option<String>,
    /// Index of the bridge or other master device.
    pub(crate) bridge: Option<u32>,
    pub(crate) up: bool,
    pub(crate) layer: LinkLayerType,
    /// Kind, as `ip -d link` shows it; empty for hardware.
    pub(crate) kind: String,
}

impl Link {
    pub(super) fn of(message: &LinkMessage) -> Link {
        let header = &message.header;
        let mut link = Link {
            index: header.index,
            name: String::new(),
            mac: None,
            mtu: 0,
            alias: None,
            bridge: None,
            up: header.flags.contains(LinkFlags::Up),
            layer: header.link_layer_type,
            kind: String::new(),
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name.clone(),
                LinkAttribute::Address(bytes) => link.mac = MacAddr::from_slice(bytes),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::IfAlias(alias) => link.alias = Some(alias.clone()),
                LinkAttribute::Controller(bridge) => link.bridge = Some(*bridge),
                LinkAttribute::LinkInfo(infos) => {
                    for info in infos {
                        if let LinkInfo::Kind(kind) = info {
                            link.kind = kind.to_string();
                        }
                    }
                }
                _ => {}
            }
        }
        link
    }
}
