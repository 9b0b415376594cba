//! A network interface of the plan.

use std::net::Ipv4Addr;

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

/// A virtio-net device, and what it is bound to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NicPlan {
    /// The interface's name, which is its network's too: letters, digits, `-` and `_`.
    pub name: String,
    /// The network it is on.
    pub network: NicNetwork,
    /// How it is bound to it.
    pub binding: NicBinding,
    /// The guest's Ethernet address, if the manifest gives one: one station's.
    #[serde(with = "crate::mac", skip_serializing_if = "Option::is_none", default)]
    pub mac: Option<[u8; 6]>,
    /// Pairs of queues, 1 to 256.
    pub queues: u16,
    /// Whether the guest finds the cable plugged in.
    pub link_up: bool,
    /// What the guest is told beside its address.
    #[serde(skip_serializing_if = "NicDhcp::is_empty", default)]
    pub dhcp: NicDhcp,
}

/// A network, which a pod has as a device in its network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NicNetwork {
    /// The pod's own.
    Pod,
    /// One that Multus attached the pod to.
    #[serde(rename_all = "camelCase")]
    Multus {
        /// Its NetworkAttachmentDefinition, `[NAMESPACE/]NAME`.
        network_name: String,
        /// It stands in for the pod's own.
        default: bool,
    },
}

/// How a guest is on a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NicBinding {
    /// It takes over the pod's place: its addresses, and its Ethernet address where the manifest gives none.
    Bridge,
    /// It is on a network of its own behind the pod's address.
    #[serde(rename_all = "camelCase")]
    Masquerade {
        /// That network, of 4 addresses at least; KubeVirt's 10.0.2.0/24 if none is given.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        cidr: Option<Ipv4Net>,
        /// The same for IPv6; KubeVirt's is fd10:0:2::/120.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        cidr6: Option<Ipv6Net>,
        /// What is let in, each once; all if empty.
        #[serde(skip_serializing_if = "Vec::is_empty", default)]
        ports: Vec<NicPort>,
    },
}

/// A port of the guest that the pod's address leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NicPort {
    /// Its protocol.
    pub protocol: NicProtocol,
    /// Its number, not 0.
    pub port: u16,
}

/// A protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NicProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// `dhcpOptions`: each fits an option of 255 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NicDhcp {
    /// The boot file, option 67.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub boot_file_name: Option<String>,
    /// The TFTP server, option 66.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tftp_server_name: Option<String>,
    /// Time servers, option 42.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub ntp_servers: Vec<Ipv4Addr>,
    /// Options 224 to 254, each once, and their text.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub private: Vec<(u8, String)>,
}

impl NicDhcp {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
