//! Keys and values of Secrets and ConfigMaps.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::field::FieldError;
use crate::names::subdomain_fault;
use crate::plan::volume_source::decode;

/// Maximum size of all values together in bytes, that of the API server.
const LIMIT: usize = 1 << 20;
/// Maximum length of a key.
const LONGEST: usize = 253;

/// Reads a map of texts.
pub(super) fn texts(
    object: &Map<String, Value>,
    field: &str,
    errors: &mut Vec<FieldError>,
) -> BTreeMap<String, String> {
    let entries = super::object(object, field).into_iter().flatten();
    let entries = entries.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
    let texts: BTreeMap<_, _> = entries.collect();
    for (key, fault) in texts.keys().filter_map(|key| Some((key, fault(key)?))) {
        errors.push(FieldError::invalid(
            format!("{field}[{key}]"),
            format!("\"{key}\": {fault}"),
        ));
    }
    texts
}

/// Reads a map of base64 texts. No value gets into a message, since it may be secret.
pub(super) fn bytes(
    object: &Map<String, Value>,
    field: &str,
    errors: &mut Vec<FieldError>,
) -> BTreeMap<String, Vec<u8>> {
    let mut decoded = BTreeMap::new();
    for (key, text) in texts(object, field, errors) {
        match decode(&text) {
            Some(bytes) => {
                decoded.insert(key, bytes);
            }
            None => {
                let path = format!("{field}[{key}]");
                let text = format!("{path} is not a valid base64 value.");
                errors.push(FieldError::invalid(path, text));
            }
        }
    }
    decoded
}

/// Checks the size of all values together.
pub(super) fn check_size(size: usize, field: &str, errors: &mut Vec<FieldError>) {
    if size > LIMIT {
        let text = format!("Too long: may not be more than {LIMIT} bytes");
        errors.push(FieldError::invalid(field, text));
    }
}

/// Error of a key, which is the name of a file, if it is invalid.
fn fault(key: &str) -> Option<&'static str> {
    let known = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    if key.len() > LONGEST {
        // The text is that of names, which have the same limit.
        subdomain_fault(key)
    } else if key.is_empty() || !key.bytes().all(known) {
        Some(
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or \
             'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')",
        )
    } else if key == "." {
        Some("must not be '.'")
    } else if key == ".." {
        Some("must not be '..'")
    } else if key.starts_with("..") {
        Some("must not start with '..'")
    } else {
        None
    }
}
