//! MAC addresses.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A MAC address, written `02:00:00:00:00:01`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// Address of the masquerade bridge in every pod. No guest may use it.
    pub const GATEWAY: MacAddr = MacAddr([2, 0, 0, 0, 0, 0]);

    /// A random, locally administered unicast address.
    pub fn random() -> MacAddr {
        let mut bytes = [0; 6];
        bytes.copy_from_slice(&uuid::Uuid::new_v4().as_bytes()[..6]);
        bytes[0] = bytes[0] & 0xfc | 2;
        MacAddr(bytes)
    }

    /// `None` unless `bytes` has six bytes.
    pub fn from_slice(bytes: &[u8]) -> Option<MacAddr> {
        bytes.try_into().ok().map(MacAddr)
    }

    /// True unless it is a multicast address or all zeroes.
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Error of parsing a MAC address.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0:?} is not a MAC address")]
pub struct ParseMacAddrError(String);

impl FromStr for MacAddr {
    type Err = ParseMacAddrError;

    fn from_str(text: &str) -> Result<MacAddr, ParseMacAddrError> {
        let (separator, digits) = match text.as_bytes().get(2) {
            Some(b':') => (':', 2),
            Some(b'-') => ('-', 2),
            _ => ('.', 4),
        };
        let mut bytes = Vec::new();
        for group in text.split(separator) {
            let plain = group.len() == digits && group.bytes().all(|byte| byte.is_ascii_hexdigit());
            let value = plain.then(|| u16::from_str_radix(group, 16).ok()).flatten();
            let value = value
                .ok_or_else(|| ParseMacAddrError(text.to_owned()))?
                .to_be_bytes();
            bytes.extend_from_slice(&value[2 - digits / 2..]);
        }
        MacAddr::from_slice(&bytes).ok_or_else(|| ParseMacAddrError(text.to_owned()))
    }
}

impl From<MacAddr> for String {
    fn from(mac: MacAddr) -> String {
        mac.to_string()
    }
}

impl TryFrom<String> for MacAddr {
    type Error = ParseMacAddrError;

    fn try_from(text: String) -> Result<MacAddr, ParseMacAddrError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let mac: MacAddr = "0A:58:0a:f4:01:05".parse().unwrap();
        assert_eq!(mac.to_string(), "0a:58:0a:f4:01:05");
        assert_eq!("0a-58-0a-f4-01-05".parse::<MacAddr>().unwrap(), mac);
        assert_eq!("0a58.0af4.0105".parse::<MacAddr>().unwrap(), mac);
        for bad in [
            "",
            "0a:58",
            "0a:58:0a:f4:01:05:06",
            "+a:58:0a:f4:01:05",
            "g0:58:0a:f4:01:05",
        ] {
            assert!(bad.parse::<MacAddr>().is_err(), "{bad}");
        }
    }

    #[test]
    fn random_addresses_are_local_unicast() {
        for _ in 0..100 {
            let mac = MacAddr::random();
            assert!(mac.is_unicast() && mac.0[0] & 2 == 2, "{mac}");
        }
    }
}
