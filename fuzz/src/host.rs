//! Parts that the targets of the host's side share: changes of bytes and of JSON documents, a clock, directories.

use std::time::Duration;

use arbitrary::Arbitrary;
use serde_json::{Map, Number, Value};

/// Longest change of bytes.
const INSERTED: usize = 512;

/// Replaces some bytes.
#[derive(Arbitrary, Debug)]
pub struct Splice {
    at: u16,
    removed: u8,
    inserted: Vec<u8>,
}

/// Applies at most eight changes.
pub fn splice(bytes: &mut Vec<u8>, splices: &[Splice]) {
    for Splice {
        at,
        removed,
        inserted,
    } in splices.iter().take(8)
    {
        let at = usize::from(*at) % (bytes.len() + 1);
        let end = (at + usize::from(*removed)).min(bytes.len());
        bytes.splice(at..end, inserted.iter().take(INSERTED).copied());
    }
}

/// A value of JSON. Texts and names of fields are mostly words that a target knows.
#[derive(Arbitrary, Debug)]
pub enum Json {
    Null,
    Bool(bool),
    Small(i8),
    Word(u8),
    Int(i64),
    Uint(u64),
    Float(f64),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(u8, Json)>),
}

/// The words of a target: values and names of fields.
pub type Words<'a> = &'a [&'a str];

fn word(words: Words<'_>, at: u8) -> &str {
    words
        .get(usize::from(at) % words.len().max(1))
        .copied()
        .unwrap_or_default()
}

impl Json {
    pub fn value(&self, words: Words<'_>) -> Value {
        self.at_depth(words, 0)
    }

    fn at_depth(&self, words: Words<'_>, depth: usize) -> Value {
        match self {
            Json::Null => Value::Null,
            Json::Bool(value) => Value::Bool(*value),
            Json::Small(number) => (*number).into(),
            Json::Word(at) => word(words, *at).into(),
            Json::Int(number) => (*number).into(),
            Json::Uint(number) => (*number).into(),
            Json::Float(number) => Number::from_f64(*number).map_or(Value::Null, Value::Number),
            Json::Text(text) => text.as_str().into(),
            Json::List(_) | Json::Object(_) if depth > 100 => Value::Null,
            Json::List(items) => items.iter().map(|item| item.at_depth(words, depth + 1)).collect(),
            Json::Object(fields) => {
                let fields = fields.iter();
                let field = |(name, value): &(u8, Json)| {
                    (word(words, *name).to_owned(), value.at_depth(words, depth + 1))
                };
                Value::Object(fields.map(field).collect::<Map<_, _>>())
            }
        }
    }
}

/// A change of one value of a document, which is chosen by its number.
#[derive(Arbitrary, Debug)]
pub struct JsonEdit {
    at: u16,
    change: JsonChange,
}

#[derive(Arbitrary, Debug)]
enum JsonChange {
    Replace(Json),
    /// Sets a field of an object or adds an item to a list.
    Add(u8, Json),
    /// Removes a field or an item.
    Remove(u8),
    /// Repeats an item of a list.
    Repeat(u8),
    /// Puts bytes into a text.
    Splice(Splice),
    /// Copies another value of the document.
    Copy(u16),
}

/// Applies at most eight changes.
pub fn edit_json(document: &mut Value, edits: &[JsonEdit], words: Words<'_>) {
    for JsonEdit { at, change } in edits.iter().take(8) {
        let count = count(document);
        let copied = match change {
            JsonChange::Copy(from) => {
                nth(document, &mut (usize::from(*from) % count)).map(|value| value.clone())
            }
            _ => None,
        };
        let Some(value) = nth(document, &mut (usize::from(*at) % count)) else {
            continue;
        };
        match (change, value) {
            (JsonChange::Replace(new), value) => *value = new.value(words),
            (JsonChange::Add(name, new), Value::Object(fields)) => {
                fields.insert(word(words, *name).to_owned(), new.value(words));
            }
            (JsonChange::Add(_, new), Value::Array(items)) => items.push(new.value(words)),
            (JsonChange::Remove(n), Value::Object(fields)) => {
                let name = fields.keys().nth(usize::from(*n) % fields.len().max(1)).cloned();
                name.and_then(|name| fields.remove(&name));
            }
            (JsonChange::Remove(n), Value::Array(items)) if !items.is_empty() => {
                items.remove(usize::from(*n) % items.len());
            }
            (JsonChange::Repeat(n), Value::Array(items)) if !items.is_empty() => {
                items.push(items[usize::from(*n) % items.len()].clone());
            }
            (JsonChange::Splice(change), Value::String(text)) => {
                let mut bytes = std::mem::take(text).into_bytes();
                splice(&mut bytes, std::slice::from_ref(change));
                *text = String::from_utf8_lossy(&bytes).into_owned();
            }
            (JsonChange::Copy(_), value) => {
                *value = copied.filter(|new| count_at_most(new, 500)).unwrap_or_default()
            }
            _ => {}
        }
    }
}

fn count_at_most(value: &Value, most: usize) -> bool {
    count(value) <= most
}

/// Number of values in a document.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// The value of a number, in document order.
fn nth<'a>(value: &'a mut Value, n: &mut usize) -> Option<&'a mut Value> {
    if *n == 0 {
        return Some(value);
    }
    *n -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| nth(item, n)),
        Value::Object(fields) => fields.values_mut().find_map(|value| nth(value, n)),
        _ => None,
    }
}

/// Runs a future on a runtime whose clock goes on as soon as every task waits.
pub fn with_clock<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime")
        .block_on(future)
}

/// Lets the other tasks run until they wait.
pub async fn settle() {
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// A directory, removed when it is dropped. `cargo xtask fuzz` sets `TMPDIR` to one in memory.
pub fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

/// Number of open descriptors of this process.
pub fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("the descriptors")
        .count()
}

/// Hexadecimal digits.
pub fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
