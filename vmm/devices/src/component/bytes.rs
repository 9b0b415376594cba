//! Byte strings in a state.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::RestoreError;

/// A byte string, base64 (RFC 4648, section 4) in JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    /// The bytes, which must be exactly `N`.
    ///
    /// # Errors
    /// There are fewer or more. Names `field`.
    pub fn array<const N: usize>(&self, field: &'static str) -> Result<[u8; N], RestoreError> {
        let bytes = self.0.as_slice();
        bytes
            .try_into()
            .map_err(|_| RestoreError::field(field, format!("has {} bytes, not {N}", bytes.len())))
    }

    /// The bytes, which must be at most `limit`.
    ///
    /// # Errors
    /// There are more. Names `field`.
    pub fn at_most(&self, limit: usize, field: &'static str) -> Result<&[u8], RestoreError> {
        let bytes = self.0.as_slice();
        if bytes.len() > limit {
            let reason = format!("has {} bytes, more than {limit}", bytes.len());
            return Err(RestoreError::field(field, reason));
        }
        Ok(bytes)
    }
}

impl<T: Into<Vec<u8>>> From<T> for Bytes {
    fn from(bytes: T) -> Self {
        Self(bytes.into())
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Bytes;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a base64 string")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Bytes, E> {
                STANDARD.decode(text).map(Bytes).map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_come_back(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let text = serde_json::to_string(&Bytes(bytes.clone())).unwrap();
            prop_assert!(text.len() <= bytes.len().div_ceil(3) * 4 + 2);
            prop_assert_eq!(serde_json::from_str::<Bytes>(&text).unwrap().0, bytes);
        }

        #[test]
        fn any_text_is_decoded_or_refused(text in ".*") {
            let _ = serde_json::from_value::<Bytes>(text.into());
        }
    }

    #[test]
    fn a_wrong_length_is_refused_by_the_name_of_its_field() {
        let bytes = Bytes::from([1, 2, 3]);
        assert_eq!(bytes.array::<3>("ram").unwrap(), [1, 2, 3]);
        let refused = bytes.array::<4>("ram").unwrap_err().to_string();
        assert_eq!(refused, "field \"ram\": has 3 bytes, not 4");
        assert!(bytes.at_most(3, "fifo").is_ok());
        let refused = bytes.at_most(2, "fifo").unwrap_err().to_string();
        assert_eq!(refused, "field \"fifo\": has 3 bytes, more than 2");
    }
}
