//! Secrets and ConfigMaps.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

use super::{ObjectKind, keys, text};
use crate::field::FieldError;
use crate::load::Metadata;
use crate::schema::Diagnostics;

/// A Secret. Its values are not in its `Debug` output.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    /// Name, namespace and labels.
    pub metadata: Metadata,
    /// `type`; `Opaque` if the manifest gives none.
    pub secret_type: String,
    /// `data` decoded, and `stringData`, which wins.
    pub data: BTreeMap<String, Vec<u8>>,
    /// True if a stored Secret of this name must not change any more.
    pub immutable: bool,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret")
            .field("metadata", &self.metadata)
            .field("secret_type", &self.secret_type)
            .field("data", &self.data.keys().collect::<Vec<_>>())
            .field("immutable", &self.immutable)
            .finish()
    }
}

/// A ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigMap {
    /// Name, namespace and labels.
    pub metadata: Metadata,
    /// `data`
    pub data: BTreeMap<String, String>,
    /// `binaryData`, decoded.
    pub binary_data: BTreeMap<String, Vec<u8>>,
    /// True if a stored ConfigMap of this name must not change any more.
    pub immutable: bool,
}

impl ConfigMap {
    /// Its files by name, those of `data` first.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let texts = self
            .data
            .iter()
            .map(|(key, text)| (key.as_str(), text.as_bytes()));
        let binaries = self.binary_data.iter();
        texts.chain(binaries.map(|(key, bytes)| (key.as_str(), bytes.as_slice())))
    }
}

pub(super) fn read_secret(
    object: &Map<String, Value>,
    metadata: Metadata,
    found: &mut Diagnostics,
) -> ObjectKind {
    let errors = &mut found.schema;
    let mut data = keys::bytes(object, "data", errors);
    let more = keys::texts(object, "stringData", errors);
    data.extend(more.into_iter().map(|(key, text)| (key, text.into_bytes())));
    keys::check_size(data.values().map(Vec::len).sum(), "data", errors);
    let secret_type = text(object, "type").unwrap_or("Opaque").to_owned();
    check_type(&secret_type, &data, errors);
    ObjectKind::Secret(Secret {
        metadata,
        secret_type,
        data,
        immutable: is_immutable(object),
    })
}

/// Checks that a Secret has the keys of its type.
fn check_type(secret_type: &str, data: &BTreeMap<String, Vec<u8>>, errors: &mut Vec<FieldError>) {
    let (keys, json): (&[&str], bool) = match secret_type {
        "kubernetes.io/dockercfg" => (&[".dockercfg"], true),
        "kubernetes.io/dockerconfigjson" => (&[".dockerconfigjson"], true),
        "kubernetes.io/ssh-auth" => (&["ssh-privatekey"], false),
        "kubernetes.io/tls" => (&["tls.crt", "tls.key"], false),
        "kubernetes.io/basic-auth" => {
            if !data.contains_key("username") && !data.contains_key("password") {
                let text = "username or password is required by the Secret's type";
                errors.push(FieldError::required("data[username]", text));
            }
            return;
        }
        _ => return,
    };
    for key in keys {
        let field = format!("data[{key}]");
        match data.get(*key) {
            None => {
                let text = format!("{key} is required by the Secret's type");
                errors.push(FieldError::required(field, text));
            }
            Some(bytes) if json && serde_json::from_slice::<Map<String, Value>>(bytes).is_err() => {
                errors.push(FieldError::invalid(field, "must be a JSON object"));
            }
            Some(_) => {}
        }
    }
}

pub(super) fn read_config_map(
    object: &Map<String, Value>,
    metadata: Metadata,
    found: &mut Diagnostics,
) -> ObjectKind {
    let errors = &mut found.schema;
    let data = keys::texts(object, "data", errors);
    let binary_data = keys::bytes(object, "binaryData", errors);
    for key in binary_data.keys().filter(|key| data.contains_key(*key)) {
        let text = format!("\"{key}\": duplicate of key present in binaryData");
        errors.push(FieldError::invalid(format!("data[{key}]"), text));
    }
    let size = data.values().map(String::len).sum::<usize>();
    let size = size + binary_data.values().map(Vec::len).sum::<usize>();
    keys::check_size(size, "data", errors);
    ObjectKind::ConfigMap(ConfigMap {
        metadata,
        data,
        binary_data,
        immutable: is_immutable(object),
    })
}

fn is_immutable(object: &Map<String, Value>) -> bool {
    object.get("immutable").and_then(Value::as_bool).unwrap_or(false)
}
