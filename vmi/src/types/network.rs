//! Interfaces and networks.

use serde::Deserialize;

use super::Empty;

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
        pod: Option<Empty>,
        multus: Option<Multus>,
    }

    /// `spec.networks[].multus`
    Multus {
        network_name: String,
        default: bool,
    }
}
