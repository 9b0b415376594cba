//! Parses JSON within the limits of YAML. JSON allows characters that YAML does not, such as U+007F.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::error::LoadError;
use super::yaml::{DEPTH, NODES, too_complex, too_deep};
use crate::field::OneLine;

/// Parses one object.
pub(super) fn parse(text: &str) -> Result<Value, LoadError> {
    let nodes = Cell::new(0);
    let seed = Node {
        depth: 0,
        nodes: &nodes,
    };
    let parsed = seed.deserialize(&mut serde_json::Deserializer::from_str(text));
    parsed.map_err(|error| {
        let message = error.to_string();
        // The position is reported separately.
        let message = message
            .rsplit_once(" at line ")
            .map_or(&*message, |(text, _)| text);
        LoadError::Syntax {
            line: error.line() as u64,
            column: error.column() as u64,
            message: OneLine(message).to_string(),
        }
    })
}

/// A value below `depth` objects and arrays.
#[derive(Clone, Copy)]
struct Node<'a> {
    depth: usize,
    /// Number of values and keys so far.
    nodes: &'a Cell<usize>,
}

impl Node<'_> {
    fn count<E: Error>(self) -> Result<(), E> {
        self.nodes.set(self.nodes.get() + 1);
        match self.nodes.get() {
            ..=NODES => Ok(()),
            _ => Err(E::custom(too_complex())),
        }
    }

    fn below<E: Error>(self) -> Result<Self, E> {
        match self.depth + 1 {
            depth @ ..=DEPTH => Ok(Self { depth, ..self }),
            _ => Err(E::custom(too_deep())),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Node<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.count()?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let below = self.below()?;
        let mut array = Vec::new();
        while let Some(item) = items.next_element_seed(below)? {
            array.push(item);
        }
        Ok(array.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let below = self.below()?;
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            below.count()?;
            if object.contains_key(&key) {
                let text = format!("duplicate mapping key: {key} not allowed here");
                return Err(A::Error::custom(text));
            }
            object.insert(key, entries.next_value_seed(below)?);
        }
        Ok(object.into())
    }
}
