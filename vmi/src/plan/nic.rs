//! A network interface of the plan.

use std::net::Ipv4Addr;

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

/// A virtio-net device and its binding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NicPlan {
    /// Name of the interface and its network: letters, digits, `-` and `_`.
    pub name: String,
    /// Network of the interface.
    pub network: NicNetwork,
    /// Binding to the network.
    pub binding: NicBinding,
    /// MAC address of the guest, if the manifest has one; always unicast.
    #[serde(with = "crate::mac", skip_serializing_if = "Option::is_none", default)]
    pub mac: Option<[u8; 6]>,
    /// Number of queue pairs, 1 to 127.
    pub queues: u16,
    /// Initial link state.
    pub link_up: bool,
    /// Additional DHCP options.
    #[serde(skip_serializing_if = "NicDhcp::is_empty", default)]
    pub dhcp: NicDhcp,
}

/// A network of the pod, present as a device in its network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NicNetwork {
    /// The pod network.
    Pod,
    /// A network attached by Multus.
    #[serde(rename_all = "camelCase")]
    Multus {
        /// Its NetworkAttachmentDefinition, `[NAMESPACE/]NAME`.
        network_name: String,
        /// It replaces the pod network.
        default: bool,
    },
}

/// Binding of a guest to a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NicBinding {
    /// The guest takes over the pod's IP addresses and, unless the manifest has one, its MAC address.
    Bridge,
    /// The guest is on a private network, behind NAT with the pod's address.
    #[serde(rename_all = "camelCase")]
    Masquerade {
        /// The private network, at least 4 addresses; KubeVirt's default is 10.0.2.0/24.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        cidr: Option<Ipv4Net>,
        /// The private IPv6 network; KubeVirt's default is fd10:0:2::/120.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        cidr6: Option<Ipv6Net>,
        /// Forwarded ports without duplicates; if empty, all are forwarded.
        #[serde(skip_serializing_if = "Vec::is_empty", default)]
        ports: Vec<NicPort>,
    },
}

/// A port forwarded from the pod to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NicPort {
    /// Protocol.
    pub protocol: NicProtocol,
    /// Port number, not 0.
    pub port: u16,
}

/// Transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NicProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// `dhcpOptions`; each fits into a DHCP option of 255 bytes.
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
    /// Options 224 to 254 with their texts, without duplicates.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub private: Vec<(u8, String)>,
}

impl NicDhcp {
    /// True without any option.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
