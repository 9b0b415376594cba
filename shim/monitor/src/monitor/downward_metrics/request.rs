//! Requests of vhostmd's clients: `GET /metrics/XML`, then an empty line.

/// Longest request in bytes.
pub(super) const MOST_BYTES: usize = 1024;

/// The first request in what a guest has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// Not whole yet.
    Partial,
    /// The metrics are wanted. Holds the length of the request.
    Metrics(usize),
    /// Anything else. Where it ends is unknown.
    Invalid,
}

/// Reads the first request of `bytes`. Lines end with LF or CRLF.
pub(super) fn parse(bytes: &[u8]) -> Request {
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n');
    let (Some(first), second) = (lines.next(), lines.next()) else {
        return Request::Partial;
    };
    let (Some(line), Some(blank)) = (content(first), second.and_then(content)) else {
        return match bytes.len() {
            0..MOST_BYTES => Request::Partial,
            _ => Request::Invalid,
        };
    };
    let length = first.len() + second.map_or(0, <[u8]>::len);
    match (line, blank) {
        (b"GET /metrics/XML", b"") if length <= MOST_BYTES => Request::Metrics(length),
        _ => Request::Invalid,
    }
}

/// A line without its end; `None` if it has none yet.
fn content(line: &[u8]) -> Option<&[u8]> {
    let line = line.strip_suffix(b"\n")?;
    Some(line.strip_suffix(b"\r").unwrap_or(line))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_request_is_valid() {
        for valid in [&b"GET /metrics/XML\r\n\r\n"[..], b"GET /metrics/XML\n\n"] {
            assert_eq!(parse(valid), Request::Metrics(valid.len()));
            for end in 0..valid.len() {
                assert_eq!(parse(&valid[..end]), Request::Partial, "{end}");
            }
            let two = [valid, b"GET"].concat();
            assert_eq!(parse(&two), Request::Metrics(valid.len()));
        }
        for invalid in [
            &b"\n\n"[..],
            b"GET /metrics/XML\n \n",
            b"POST /metrics/XML\n\n",
            b"GET /metrics/xml\n\n",
            b"GET  /metrics/XML\n\n",
            b"GET /metrics/XML\0\n\n",
            b"\xff\xff\r\n\r\n",
        ] {
            assert_eq!(parse(invalid), Request::Invalid, "{invalid:?}");
        }
    }

    #[test]
    fn a_line_without_an_end_is_invalid_once_it_is_too_long() {
        assert_eq!(parse(&[b'x'; MOST_BYTES - 1]), Request::Partial);
        assert_eq!(parse(&[b'x'; MOST_BYTES]), Request::Invalid);
        let mut long = b"GET /metrics/XML\n".to_vec();
        long.resize(MOST_BYTES, b'y');
        assert_eq!(parse(&long), Request::Invalid);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(
            bytes in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), any::<u8>()], 0..1100),
        ) {
            match parse(&bytes) {
                Request::Partial => prop_assert!(bytes.len() < MOST_BYTES),
                Request::Metrics(length) => prop_assert!(length <= bytes.len()),
                Request::Invalid => prop_assert!(!bytes.is_empty()),
            }
        }
    }
}
