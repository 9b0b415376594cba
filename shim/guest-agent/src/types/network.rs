//! Network interfaces as the guest sees them.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::bounded;

/// Most addresses of an interface. Further ones are dropped.
const MAX_ADDRESSES: usize = 256;

/// `GuestNetworkInterface`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NetworkInterface {
    #[serde(deserialize_with = "bounded::text")]
    pub name: String,
    /// MAC address as the guest writes it.
    #[serde(
        default,
        deserialize_with = "bounded::optional_text",
        skip_serializing_if = "Option::is_none"
    )]
    pub hardware_address: Option<String>,
    #[serde(default, deserialize_with = "bounded::inner_list::<_, _, MAX_ADDRESSES>")]
    pub ip_addresses: Vec<IpAddress>,
}

impl NetworkInterface {
    /// The address that KubeVirt shows first: the first IPv4 address, else the first of all.
    #[must_use]
    pub fn primary(&self) -> Option<&IpAddress> {
        let is_v4 = |address: &&IpAddress| address.ip_address_type == IpAddressType::Ipv4;
        self.ip_addresses.iter().find(is_v4).or(self.ip_addresses.first())
    }
}

/// `GuestIpAddress`. The guest may have written any text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct IpAddress {
    #[serde(deserialize_with = "bounded::text")]
    pub ip_address: String,
    pub ip_address_type: IpAddressType,
    /// Length of the network's prefix in bits.
    pub prefix: u8,
}

impl IpAddress {
    /// The address without its zone (`%eth0`), which Windows writes; `None` if it is none of its type, or its prefix
    /// is too long.
    #[must_use]
    pub fn parse(&self) -> Option<IpAddr> {
        let text = self.ip_address.split('%').next().unwrap_or_default();
        let address: IpAddr = text.parse().ok()?;
        let (expected, longest) = match address {
            IpAddr::V4(_) => (IpAddressType::Ipv4, 32),
            IpAddr::V6(_) => (IpAddressType::Ipv6, 128),
        };
        (self.ip_address_type == expected && self.prefix <= longest).then_some(address)
    }
}

/// `GuestIpAddressType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IpAddressType {
    Ipv4,
    Ipv6,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str, ip_address_type: IpAddressType, prefix: u8) -> IpAddress {
        IpAddress {
            ip_address: text.to_owned(),
            ip_address_type,
            prefix,
        }
    }

    #[test]
    fn addresses_are_checked() {
        let zone = address("fe80::1%12", IpAddressType::Ipv6, 64);
        assert_eq!(zone.parse(), Some("fe80::1".parse().unwrap()));
        assert_eq!(
            address("10.0.0.1", IpAddressType::Ipv4, 24).parse(),
            Some("10.0.0.1".parse().unwrap())
        );
        for bad in [
            address("10.0.0.1", IpAddressType::Ipv6, 24),
            address("10.0.0.1", IpAddressType::Ipv4, 33),
            address("\u{1b}", IpAddressType::Ipv4, 8),
        ] {
            assert_eq!(bad.parse(), None);
        }
    }

    #[test]
    fn the_first_address_of_version_4_is_shown_first() {
        let mut interface = NetworkInterface {
            name: "eth0".to_owned(),
            hardware_address: None,
            ip_addresses: vec![
                address("fe80::1", IpAddressType::Ipv6, 64),
                address("10.0.0.1", IpAddressType::Ipv4, 8),
            ],
        };
        assert_eq!(interface.primary().unwrap().ip_address, "10.0.0.1");
        interface.ip_addresses.pop();
        assert_eq!(interface.primary().unwrap().ip_address, "fe80::1");
        interface.ip_addresses.clear();
        assert_eq!(interface.primary(), None);
    }
}
