//! Changes of JSON documents.

use arbitrary::Arbitrary;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// A change of one value somewhere in a document.
#[derive(Arbitrary, Clone, Debug)]
pub struct Mutation {
    place: u16,
    change: Change,
}

#[derive(Arbitrary, Clone, Debug)]
enum Change {
    Number(u64),
    Negative(i64),
    /// Adds to a number.
    Near(i8),
    /// Inverts a bit of a number, or of the bytes that a text encodes.
    Flip(u16),
    Bool(bool),
    Text(String),
    Base64(Vec<u8>),
    Null,
    EmptyList,
    EmptyMap,
    /// Removes a part.
    Remove(u8),
    /// A part once more, or with another name.
    Double(u8),
    /// The value at another place.
    Copy(u16),
}

/// Number of values in `value`, itself included.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum::<usize>(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// The value number `at` in the order of [`count`].
fn nth(value: &mut Value, at: usize) -> Option<&mut Value> {
    if at == 0 {
        return Some(value);
    }
    let mut left = at - 1;
    let children: Box<dyn Iterator<Item = &mut Value>> = match value {
        Value::Array(items) => Box::new(items.iter_mut()),
        Value::Object(fields) => Box::new(fields.values_mut()),
        _ => return None,
    };
    for child in children {
        let size = count(child);
        if left < size {
            return nth(child, left);
        }
        left -= size;
    }
    None
}

impl Mutation {
    /// Applies the change.
    pub fn apply(&self, document: &mut Value) {
        let values = count(document);
        let copy = match self.change {
            Change::Copy(from) => nth(document, usize::from(from) % values).cloned(),
            _ => None,
        };
        if let Some(value) = nth(document, usize::from(self.place) % values) {
            self.change.apply(value, copy);
        }
    }
}

impl Change {
    fn apply(&self, value: &mut Value, copy: Option<Value>) {
        let new = match self {
            Self::Number(number) => json!(number),
            Self::Negative(number) => json!(number),
            Self::Near(by) => match value.as_u64() {
                Some(old) => json!(old.wrapping_add_signed((*by).into())),
                None => return,
            },
            Self::Flip(bit) => match flipped(value, *bit) {
                Some(value) => value,
                None => return,
            },
            Self::Bool(flag) => json!(flag),
            Self::Text(text) => json!(text),
            Self::Base64(bytes) => json!(STANDARD.encode(bytes)),
            Self::Null => Value::Null,
            Self::EmptyList => json!([]),
            Self::EmptyMap => json!({}),
            Self::Remove(part) => return remove(value, (*part).into()),
            Self::Double(part) => return double(value, (*part).into()),
            Self::Copy(_) => copy.unwrap_or_default(),
        };
        *value = new;
    }
}

fn flipped(value: &Value, bit: u16) -> Option<Value> {
    if let Some(old) = value.as_u64() {
        return Some(json!(old ^ 1 << (bit % 64)));
    }
    let mut bytes = STANDARD.decode(value.as_str()?).ok()?;
    let at = usize::from(bit / 8).checked_rem(bytes.len())?;
    bytes[at] ^= 1 << (bit % 8);
    Some(json!(STANDARD.encode(bytes)))
}

/// Removes a part of a value.
fn remove(value: &mut Value, part: usize) {
    match value {
        Value::Array(items) if !items.is_empty() => drop(items.remove(part % items.len())),
        Value::Object(fields) if !fields.is_empty() => {
            if let Some(name) = fields.keys().nth(part % fields.len()).cloned() {
                fields.remove(&name);
            }
        }
        Value::String(text) => drop(text.pop()),
        _ => {}
    }
}

/// Doubles a part of a value.
fn double(value: &mut Value, part: usize) {
    match value {
        Value::Array(items) if !items.is_empty() => {
            let item = items[part % items.len()].clone();
            items.push(item);
        }
        Value::Object(fields) if !fields.is_empty() => {
            if let Some((name, field)) = fields.iter().nth(part % fields.len()) {
                let (name, field) = (format!("{name}2"), field.clone());
                fields.insert(name, field);
            }
        }
        Value::String(text) => *text = text.repeat(2),
        _ => {}
    }
}
