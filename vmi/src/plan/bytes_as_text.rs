//! Serialises bytes as a string if they are UTF-8, else as `{"base64": …}`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Form {
    Text(String),
    Encoded { base64: String },
}

pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.serialize(serializer),
        Err(_) => Form::Encoded {
            base64: STANDARD.encode(bytes),
        }
        .serialize(serializer),
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    match Form::deserialize(deserializer)? {
        Form::Text(text) => Ok(text.into_bytes()),
        Form::Encoded { base64 } => STANDARD.decode(base64).map_err(serde::de::Error::custom),
    }
}
