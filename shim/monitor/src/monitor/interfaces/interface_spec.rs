//! The settings of an interface, made from the plan.

use husk_vmi::{NicBinding, NicDhcp, NicNetwork, NicPlan, NicProtocol, VmPlan};

use crate::snapshot::PluggedInterface;
use husk_network::dhcp::{DhcpOptions, DnsConfig};
use husk_network::{
    Binding, Interface, MacAddr, Masquerade, NetworkFault, PRIMARY_NIC, Port, Protocol, TapOwner,
    secondary_nic,
};

/// An interface to prepare.
#[derive(Debug, Clone)]
pub(super) struct InterfaceSpec {
    pub(super) interface: Interface,
    pub(super) options: DhcpOptions,
    pub(super) link_up: bool,
}

/// Settings that all interfaces of a VM share.
#[derive(Debug, Clone)]
pub(super) struct InterfaceDefaults {
    pub(super) owner: TapOwner,
    pub(super) hostname: String,
    pub(super) resolver: DnsConfig,
}

impl InterfaceDefaults {
    pub(super) fn new(
        plan: &VmPlan,
        owner: TapOwner,
        resolver: DnsConfig,
    ) -> Result<InterfaceDefaults, NetworkFault> {
        let resolver = match &plan.subdomain {
            Some(subdomain) => resolver.with_subdomain(subdomain)?,
            None => resolver,
        };
        Ok(InterfaceDefaults {
            owner,
            hostname: plan.hostname.clone(),
            resolver,
        })
    }

    /// The settings of the plan's interface number `index`.
    pub(super) fn planned(&self, index: u8, nic: &NicPlan) -> InterfaceSpec {
        let device = match &nic.network {
            NicNetwork::Pod | NicNetwork::Multus { default: true, .. } => PRIMARY_NIC.to_owned(),
            NicNetwork::Multus { default: false, .. } => secondary_nic(&nic.name),
        };
        let interface = Interface {
            name: nic.name.clone(),
            nic: device,
            index,
            binding: binding(&nic.binding),
            mac: nic.mac.map(MacAddr),
            queues: nic.queues,
            owner: self.owner,
        };
        InterfaceSpec {
            interface,
            options: self.options(&nic.dhcp),
            link_up: nic.link_up,
        }
    }

    /// The settings of an interface that was plugged into a saved VM, as number `index`.
    pub(super) fn saved(&self, index: u8, interface: &PluggedInterface) -> InterfaceSpec {
        InterfaceSpec {
            interface: Interface {
                name: interface.name.clone(),
                nic: interface.device.clone(),
                index,
                binding: Binding::Bridge,
                mac: Some(interface.mac),
                queues: interface.queues,
                owner: self.owner,
            },
            options: self.options(&interface.dhcp),
            link_up: interface.link_up,
        }
    }

    pub(super) fn options(&self, given: &NicDhcp) -> DhcpOptions {
        DhcpOptions {
            hostname: Some(self.hostname.clone()).filter(|name| !name.is_empty()),
            resolver: self.resolver.clone(),
            ntp_servers: given.ntp_servers.clone(),
            tftp_server: given.tftp_server_name.clone(),
            boot_file: given.boot_file_name.clone(),
            private: given.private.clone(),
            ..DhcpOptions::default()
        }
    }
}

fn binding(binding: &NicBinding) -> Binding {
    let NicBinding::Masquerade { cidr, cidr6, ports } = binding else {
        return Binding::Bridge;
    };
    let default = Masquerade::default();
    let port = |port: &husk_vmi::NicPort| Port {
        protocol: match port.protocol {
            NicProtocol::Tcp => Protocol::Tcp,
            NicProtocol::Udp => Protocol::Udp,
        },
        port: port.port,
    };
    Binding::Masquerade(Masquerade {
        cidr: cidr.unwrap_or(default.cidr),
        cidr6: cidr6.unwrap_or(default.cidr6),
        ports: ports.iter().map(port).collect(),
    })
}

#[cfg(test)]
mod tests {
    use husk_vmi::NicPort;

    use super::*;

    fn defaults() -> InterfaceDefaults {
        InterfaceDefaults {
            owner: TapOwner { uid: 107, gid: 107 },
            hostname: "demo".into(),
            resolver: DnsConfig::parse(""),
        }
    }

    fn nic(network: NicNetwork, binding: NicBinding) -> NicPlan {
        NicPlan {
            name: "red".into(),
            network,
            binding,
            mac: Some([2, 0, 0, 0, 0, 9]),
            queues: 2,
            link_up: false,
            dhcp: NicDhcp {
                boot_file_name: Some("pxe".into()),
                ..NicDhcp::default()
            },
        }
    }

    #[test]
    fn networks_have_kubevirts_devices() {
        let device = |network| {
            defaults()
                .planned(0, &nic(network, NicBinding::Bridge))
                .interface
                .nic
        };
        let multus = |default| NicNetwork::Multus {
            network_name: "x".into(),
            default,
        };
        assert_eq!(device(NicNetwork::Pod), "eth0");
        assert_eq!(device(multus(true)), "eth0");
        assert_eq!(device(multus(false)), "podb1f51a511f1");
    }

    #[test]
    fn settings_of_the_manifest_are_kept() {
        let masquerade = NicBinding::Masquerade {
            cidr: Some("10.9.0.0/24".parse().unwrap()),
            cidr6: None,
            ports: vec![NicPort {
                protocol: NicProtocol::Udp,
                port: 53,
            }],
        };
        let spec = defaults().planned(3, &nic(NicNetwork::Pod, masquerade));
        let Binding::Masquerade(network) = &spec.interface.binding else {
            panic!("{spec:?}");
        };
        assert_eq!(network.guest().to_string(), "10.9.0.2/24");
        assert_eq!(network.cidr6, Masquerade::default().cidr6);
        assert_eq!(network.ports[0].protocol, Protocol::Udp);
        assert_eq!((spec.interface.index, spec.interface.queues), (3, 2));
        assert_eq!(spec.interface.mac, Some(MacAddr([2, 0, 0, 0, 0, 9])));
        assert_eq!(spec.options.boot_file.as_deref(), Some("pxe"));
        assert_eq!(spec.options.hostname.as_deref(), Some("demo"));
        assert!(!spec.link_up);
    }

    #[test]
    fn options_of_a_plugged_interface_are_kept() {
        let saved = PluggedInterface {
            name: "red".into(),
            device: "net1".into(),
            mac: MacAddr([2, 0, 0, 0, 0, 9]),
            queues: 1,
            link_up: true,
            pci_slot: 24,
            dhcp: nic(NicNetwork::Pod, NicBinding::Bridge).dhcp,
        };
        let options = defaults().saved(1, &saved).options;
        assert_eq!(options.boot_file.as_deref(), Some("pxe"));
    }
}
