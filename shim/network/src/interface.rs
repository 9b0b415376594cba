//! Specification of an interface, and its binding to the pod's network.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use super::error::NetworkFault;
use super::mac::MacAddr;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Name in the manifest.
    pub name: String,
    /// Name of the pod's NIC.
    pub nic: String,
    /// Index among the VM's interfaces.
    pub index: u8,
    pub binding: Binding,
    /// The guest's MAC address, if the manifest sets one.
    pub mac: Option<MacAddr>,
    /// Queue pairs: as many as vCPUs with `networkInterfaceMultiqueue`, else 1.
    pub queues: u16,
    /// Owner of the tap.
    pub owner: TapOwner,
}

/// User and group that may open the tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TapOwner {
    pub uid: u32,
    pub gid: u32,
}

/// Binding of an interface to the pod's network, as in KubeVirt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Binding {
    /// The guest takes over the pod's IP and MAC addresses.
    Bridge,
    /// The guest has its own address behind the pod's, by NAT.
    Masquerade(Masquerade),
}

/// Network of a masqueraded guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Masquerade {
    /// `vmNetworkCIDR`: the first host address is the gateway's, the second the guest's.
    pub cidr: Ipv4Net,
    /// `vmIPv6NetworkCIDR`, used if the pod has IPv6.
    pub cidr6: Ipv6Net,
    /// Ports that are forwarded to the guest; all if empty.
    pub ports: Vec<Port>,
}

/// Port of the pod's address that is forwarded to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    pub protocol: Protocol,
    pub port: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    Tcp,
    Udp,
}

impl Default for Masquerade {
    fn default() -> Masquerade {
        Masquerade {
            cidr: Ipv4Net::new_assert(Ipv4Addr::new(10, 0, 2, 0), 24),
            cidr6: Ipv6Net::new_assert(Ipv6Addr::new(0xfd10, 0, 2, 0, 0, 0, 0, 0), 120),
            ports: Vec::new(),
        }
    }
}

impl Masquerade {
    /// The gateway's address and prefix length.
    pub fn gateway(&self) -> Ipv4Net {
        nth(self.cidr, 1)
    }

    /// The guest's address and prefix length.
    pub fn guest(&self) -> Ipv4Net {
        nth(self.cidr, 2)
    }

    /// The gateway's IPv6 address and prefix length.
    pub fn gateway6(&self) -> Ipv6Net {
        nth6(self.cidr6, 1)
    }

    /// The guest's IPv6 address and prefix length.
    pub fn guest6(&self) -> Ipv6Net {
        nth6(self.cidr6, 2)
    }
}

impl Binding {
    /// Name in the manifest.
    pub fn name(&self) -> &'static str {
        match self {
            Binding::Bridge => "bridge",
            Binding::Masquerade(_) => "masquerade",
        }
    }
}

impl Interface {
    /// Refuses values that no device can have.
    pub(super) fn check(&self) -> Result<(), NetworkFault> {
        let field = |field, reason: String| Err(NetworkFault::InvalidField { field, reason });
        if let Some(mac) = self.mac {
            if mac == MacAddr::GATEWAY && matches!(self.binding, Binding::Masquerade(_)) {
                let text =
                    "The requested MAC address is reserved for the in-pod bridge. Please choose another one.";
                return field("macAddress", text.to_owned());
            }
            if !mac.is_unicast() {
                return field("macAddress", format!("{mac} is not unicast"));
            }
        }
        if !(1..=256).contains(&self.queues) {
            return field(
                "queues",
                format!("a tap has 1 to 256 queues, not {}", self.queues),
            );
        }
        // The index is appended to 169.254.75.1, see `fake_address`.
        if self.index > 99 {
            return field("interfaces", "a VM has at most 100 interfaces".to_owned());
        }
        if let Binding::Masquerade(network) = &self.binding {
            if network.cidr.prefix_len() > 30 || network.cidr.network().is_unspecified() {
                return field("vmNetworkCIDR", format!("{} has no 4 addresses", network.cidr));
            }
            if network.cidr6.prefix_len() > 126 || network.cidr6.network().is_unspecified() {
                return field(
                    "vmIPv6NetworkCIDR",
                    format!("{} has no 4 addresses", network.cidr6),
                );
            }
            if network.ports.iter().any(|port| port.port == 0) {
                return field("ports", "Port field must be in range 0 < x < 65536.".to_owned());
            }
        }
        Ok(())
    }

    /// Address of the bridge that the DHCP server answers from: 169.254.75.1 with the interface's index appended.
    pub(super) fn fake_address(&self) -> Ipv4Addr {
        let last = match self.index {
            index @ 0..10 => 10 + index,
            index => 100 + index % 100,
        };
        Ipv4Addr::new(169, 254, 75, last)
    }
}

fn nth(net: Ipv4Net, host: u32) -> Ipv4Net {
    let address = u32::from(net.network()).wrapping_add(host);
    Ipv4Net::new(address.into(), net.prefix_len()).unwrap_or(net)
}

fn nth6(net: Ipv6Net, host: u128) -> Ipv6Net {
    let address = u128::from(net.network()).wrapping_add(host);
    Ipv6Net::new(address.into(), net.prefix_len()).unwrap_or(net)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface() -> Interface {
        Interface {
            name: "default".to_owned(),
            nic: "eth0".to_owned(),
            index: 0,
            binding: Binding::Bridge,
            mac: None,
            queues: 1,
            owner: TapOwner { uid: 107, gid: 107 },
        }
    }

    #[test]
    fn addresses_are_kubevirts() {
        let network = Masquerade::default();
        assert_eq!(network.gateway().to_string(), "10.0.2.1/24");
        assert_eq!(network.guest().to_string(), "10.0.2.2/24");
        assert_eq!(network.gateway6().to_string(), "fd10:0:2::1/120");
        assert_eq!(network.guest6().to_string(), "fd10:0:2::2/120");
        let fake = |index| Interface { index, ..interface() }.fake_address().to_string();
        assert_eq!([fake(0), fake(7)], ["169.254.75.10", "169.254.75.17"]);
        assert_eq!([fake(10), fake(99)], ["169.254.75.110", "169.254.75.199"]);
    }

    #[test]
    fn invalid_values_name_their_field() {
        let mac = |text: &str| Some(text.parse().unwrap());
        let small = Binding::Masquerade(Masquerade {
            cidr: "10.0.2.0/31".parse().unwrap(),
            ..Masquerade::default()
        });
        let bad = [
            (
                Interface {
                    mac: mac("02:00:00:00:00:00"),
                    binding: Binding::Masquerade(Masquerade::default()),
                    ..interface()
                },
                "macAddress",
            ),
            (
                Interface {
                    mac: mac("01:00:5e:00:00:01"),
                    ..interface()
                },
                "macAddress",
            ),
            (
                Interface {
                    queues: 0,
                    ..interface()
                },
                "queues",
            ),
            (
                Interface {
                    queues: 257,
                    ..interface()
                },
                "queues",
            ),
            (
                Interface {
                    index: 100,
                    ..interface()
                },
                "interfaces",
            ),
            (
                Interface {
                    binding: small,
                    ..interface()
                },
                "vmNetworkCIDR",
            ),
        ];
        for (interface, field) in bad {
            let fault = interface.check().unwrap_err();
            assert!(
                matches!(&fault, NetworkFault::InvalidField { field: named, .. } if *named == field),
                "{fault}"
            );
        }
        let bridged = Interface {
            mac: mac("02:00:00:00:00:00"),
            binding: Binding::Bridge,
            ..interface()
        };
        bridged.check().unwrap();
        interface().check().unwrap();
    }
}
