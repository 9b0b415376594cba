//! Kubernetes' rules for names, with its error texts.

/// Error of a DNS-1123 label (the name of a volume or namespace), if it is invalid.
pub(crate) fn label_fault(name: &str) -> Option<&'static str> {
    if name.len() > 63 {
        return Some("must be no more than 63 characters");
    }
    (!is_label(name)).then_some(
        "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and \
         end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
         '[a-z0-9]([-a-z0-9]*[a-z0-9])?')",
    )
}

/// Error of a DNS-1123 subdomain (the name of an object), if it is invalid.
#[must_use]
pub fn subdomain_fault(name: &str) -> Option<&'static str> {
    if name.len() > 253 {
        return Some("must be no more than 253 characters");
    }
    (!name.split('.').all(is_label)).then_some(
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must \
         start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
         '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')",
    )
}

fn is_label(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !name.is_empty() && !name.starts_with('-') && !name.ends_with('-') && name.bytes().all(inner)
}

/// True if a text consists of `[A-Za-z0-9_.+-]`, the characters of serial numbers.
pub(crate) fn is_serial(text: &str) -> bool {
    text.bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"_.+-".contains(&b))
}

/// True for the address of a PCI function, `0000:81:01.0`.
pub(crate) fn is_pci_address(text: &str) -> bool {
    let hex = |part: &[u8]| part.iter().all(u8::is_ascii_hexdigit);
    match text.as_bytes() {
        [
            domain @ ..,
            b':',
            b1,
            b2,
            b':',
            d1 @ (b'0' | b'1'),
            d2,
            b'.',
            b'0'..=b'7',
        ] => domain.len() == 4 && hex(domain) && hex(&[*b1, *b2, *d1, *d2]),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_rfc_1123() {
        for good in ["a", "a-b", "1", &"a".repeat(63)] {
            assert_eq!(label_fault(good), None);
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a_b", "é", "../x", &"a".repeat(64)] {
            assert!(label_fault(bad).is_some(), "{bad:?}");
        }
        assert_eq!(subdomain_fault("a.b-c.d"), None);
        for bad in ["", ".", "..", "a..b", "a/b", "a.", &"a".repeat(254)] {
            assert!(subdomain_fault(bad).is_some(), "{bad:?}");
        }
    }

    #[test]
    fn a_pci_address_has_four_parts() {
        assert!(is_pci_address("0000:81:1f.7"));
        for bad in [
            "",
            "81:01.0",
            "0000:81:21.0",
            "0000:81:01.8",
            "000g:81:01.0",
            "00000:81:01.0",
        ] {
            assert!(!is_pci_address(bad), "{bad:?}");
        }
    }
}
