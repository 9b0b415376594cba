//! Ethernet addresses: parsing those of a manifest, and serialising `02:00:00:00:00:01` in a plan.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

/// Parses a hardware address of 6, 8 or 20 bytes: `aa:bb:…`, `aa-bb-…` or `aabb.ccdd.…`.
pub(crate) fn parse_hardware_address(text: &str) -> Option<Vec<u8>> {
    let (separator, digits) = match text.as_bytes().get(2) {
        Some(b':') => (':', 2),
        Some(b'-') => ('-', 2),
        _ => ('.', 4),
    };
    let mut bytes = Vec::new();
    for group in text.split(separator) {
        if group.len() != digits || !group.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        let value = u16::from_str_radix(group, 16).ok()?.to_be_bytes();
        bytes.extend_from_slice(&value[2 - digits / 2..]);
    }
    matches!(bytes.len(), 6 | 8 | 20).then_some(bytes)
}

/// Parses an Ethernet address of 6 bytes.
pub(crate) fn parse_ethernet(text: &str) -> Option<[u8; 6]> {
    parse_hardware_address(text)?.try_into().ok()
}

pub(crate) fn serialize<S: Serializer>(mac: &Option<[u8; 6]>, serializer: S) -> Result<S::Ok, S::Error> {
    match mac {
        None => serializer.serialize_none(),
        Some([a, b, c, d, e, f]) => {
            serializer.collect_str(&format_args!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}"))
        }
    }
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<[u8; 6]>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let none = || D::Error::custom(format!("{text:?} is not an Ethernet address"));
    parse_ethernet(&text).map(Some).ok_or_else(none)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_spellings_are_read() {
        let mac = Some([0x0a, 0x58, 0x0a, 0xf4, 0x01, 0x05]);
        for text in ["0A:58:0a:f4:01:05", "0a-58-0a-f4-01-05", "0a58.0af4.0105"] {
            assert_eq!(parse_ethernet(text), mac, "{text}");
        }
        assert_eq!(
            parse_hardware_address("0a:58:0a:f4:01:05:06:07").map(|bytes| bytes.len()),
            Some(8)
        );
        for bad in [
            "",
            "0a:58",
            "0a:58-0a:f4:01:05",
            "+a:58:0a:f4:01:05",
            "é0:58:0a:f4:01:05",
            "0a:58:0a:f4:01:05:06",
        ] {
            assert_eq!(parse_ethernet(bad), None, "{bad}");
        }
    }
}
