//! Interfaces, networks and name servers.

use serde::Deserialize;

use super::common::{Empty, Named};

manifest! {
    /// `spec.domain.devices.interfaces[]`
    Interface {
        name: String,
        model: Option<String>,
        bridge: Option<Empty>,
        masquerade: Option<Empty>,
        ports: Vec<Port>,
        mac_address: Option<String>,
        boot_order: Option<i64>,
        state: Option<String>,
        dhcp_options: Option<DhcpOptions>,
    }

    /// `spec.domain.devices.interfaces[].dhcpOptions`
    DhcpOptions {
        boot_file_name: Option<String>,
        tftp_server_name: Option<String>,
        ntp_servers: Vec<String>,
        private_options: Vec<DhcpPrivateOption>,
    }

    /// `spec.domain.devices.interfaces[].dhcpOptions.privateOptions[]`
    DhcpPrivateOption {
        option: i64,
        value: String,
    }

    /// `spec.domain.devices.interfaces[].ports[]`
    Port {
        name: Option<String>,
        protocol: Option<String>,
        port: i64,
    }

    /// `spec.networks[]`
    Network {
        name: String,
        pod: Option<PodNetwork>,
        multus: Option<Multus>,
    }

    /// `spec.networks[].pod`
    PodNetwork {
        #[serde(rename = "vmNetworkCIDR")]
        vm_network_cidr: Option<String>,
        #[serde(rename = "vmIPv6NetworkCIDR")]
        vm_ipv6_network_cidr: Option<String>,
    }

    /// `spec.networks[].multus`
    Multus {
        network_name: String,
        default: bool,
    }

    /// `spec.dnsConfig`
    DnsConfig {
        nameservers: Vec<String>,
        searches: Vec<String>,
        options: Vec<Named>,
    }
}

impl Interface {
    /// True for `state: absent`: the guest gets no device.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.state.as_deref() == Some("absent")
    }

    /// The model, if it is not virtio.
    pub(crate) fn emulated_model(&self) -> Option<&str> {
        self.model
            .as_deref()
            .filter(|model| !matches!(*model, "" | "virtio"))
    }
}

impl Network {
    /// True for the pod's default network.
    pub(crate) fn is_default(&self) -> bool {
        self.pod.is_some() || self.multus.as_ref().is_some_and(|multus| multus.default)
    }
}

impl PodNetwork {
    /// `vmNetworkCIDR`, if not empty.
    pub(crate) fn cidr(&self) -> Option<&str> {
        self.vm_network_cidr.as_deref().filter(|cidr| !cidr.is_empty())
    }

    /// `vmIPv6NetworkCIDR`, if not empty.
    pub(crate) fn cidr6(&self) -> Option<&str> {
        self.vm_ipv6_network_cidr
            .as_deref()
            .filter(|cidr| !cidr.is_empty())
    }
}
