//! What is asked for: an interface of the manifest, and how it is bound to the pod's network.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use super::error::NetworkFault;
use super::mac::MacAddr;

/// One interface of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name in the manifest.
    pub name: String,
    /// The pod's device it is bound to.
    pub nic: String,
    /// Its place among the VM's interfaces.
    pub index: u8,
    /// How it is bound.
    pub binding: Binding,
    /// The guest's Ethernet address, if the manifest gives one.
    pub mac: Option<MacAddr>,
    /// Pairs of queues; as many as vCPUs with `networkInterfaceMultiqueue`, else 1.
    pub queues: u16,
    /// Whose the tap is.
    pub owner: TapOwner,
}

/// A user and a group, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TapOwner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// How an interface is bound to the pod's network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Binding {
    /// The guest takes over the pod's address and Ethernet address.
    Bridge,
    /// The guest has an address of its own behind the pod's.
    Masquerade(Masquerade),
}

/// The network behind the pod's address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Masquerade {
    /// `vmNetworkCIDR`: the first host is the gateway, the second the guest.
    pub cidr: Ipv4Net,
    /// `vmIPv6NetworkCIDR`, used where the pod has IPv6.
    pub cidr6: Ipv6Net,
    /// What is let in; all if empty.
    pub ports: Vec<Port>,
}

/// A port of the guest that the pod's address leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its number.
    pub port: u16,
}

/// A protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
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
    /// The gateway's address, with the network's length.
    pub fn gateway(&self) -> Ipv4Net {
        nth(self.cidr, 1)
    }

    /// The guest's.
    pub fn guest(&self) -> Ipv4Net {
        nth(self.cidr, 2)
    }

    /// The gateway's IPv6 address.
    pub fn gateway6(&self) -> Ipv6Net {
        nth6(self.cidr6, 1)
    }

    /// The guest's.
    pub fn guest6(&self) -> Ipv6Net {
        nth6(self.cidr6, 2)
    }
}

impl Binding {
    /// What the manifest calls it.
    pub fn name(&self) -> &'static str {
        match self {
            Binding::Bridge => "bridge",
            Binding::Masquerade(_) => "masquerade",
        }
    }
}

impl Interface {
    /// Finds what no device could be made of.
    pub(super) fn check(&self) -> Result<(), NetworkFault> {
        let field = |field, reason: String| Err(NetworkFault::InvalidField { field, reason });
        if let Some(mac) = self.mac {
            if mac == MacAddr::GATEWAY && matches!(self.binding, Binding::Masquerade(_)) {
                let text =
                    "The requested MAC address is reserved for the in-pod bridge. Please choose another one.";
                return field("macAddress", text.to_owned());
            }
            if !mac.is_unicast() {
                return field("macAddress", format!("{mac} is not the address of one station"));
            }
        }
        if !(1..=256).contains(&self.queues) {
            return field(
                "queues",
                format!("a tap has 1 to 256 queues, not {}", self.queues),
            );
        }
        // Its number is written behind 169.254.75.1.
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

    /// The address of the bridge that the DHCP server answers from: 169.254.75.1 with the interface's place behind it.
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
    fn what_cannot_be_names_its_field() {
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
