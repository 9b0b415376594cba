//! The network interfaces of a plan.

use std::net::Ipv4Addr;

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

/// A network interface, and the network it is on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NicPlan {
    /// Its name and its network's.
    pub name: String,
    /// The network.
    pub network: NicNetwork,
    /// How it is bound to the pod's device.
    pub binding: NicBinding,
    /// The guest's Ethernet address, if the manifest gives one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mac: Option<[u8; 6]>,
    /// Pairs of queues.
    pub queues: u16,
    /// Whether its cable is plugged in.
    pub link_up: bool,
    /// What the guest is told beside its address.
    pub dhcp: NicDhcp,
}

/// What an interface is on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NicNetwork {
    /// The pod network.
    Pod,
    /// A network that Multus attaches.
    #[serde(rename_all = "camelCase")]
    Multus {
        /// The NetworkAttachmentDefinition.
        network_name: String,
        /// It is in the pod network's place.
        default: bool,
    },
}

/// How an interface is bound to the pod's device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NicBinding {
    /// The guest takes over the pod's addresses.
    Bridge,
    /// The guest is behind the pod's address.
    Masquerade {
        /// `vmNetworkCIDR`.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        cidr: Option<Ipv4Net>,
        /// `vmIPv6NetworkCIDR`.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        cidr6: Option<Ipv6Net>,
        /// What is let in; all if empty.
        ports: Vec<NicPort>,
    },
}

/// A port that is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NicPort {
    /// Its protocol.
    pub protocol: NicProtocol,
    /// Its number.
    pub port: u16,
}

/// A protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NicProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// `dhcpOptions`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NicDhcp {
    /// Option 67.
    pub boot_file_name: Option<String>,
    /// Option 66.
    pub tftp_server_name: Option<String>,
    /// Option 42.
    pub ntp_servers: Vec<Ipv4Addr>,
    /// Options 224 to 254.
    pub private: Vec<(u8, String)>,
}
