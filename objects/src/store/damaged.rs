//! Reads what it can from the file of an object that is damaged.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use husk_vmi::MANIFEST_LIMIT;
use jiff::Timestamp;
use serde_json::{Map, Value};

use crate::key::Key;

/// The UID, the time of creation and the owners in the file of `key`, as far as they are well-formed: claims and
/// DataVolumes name the UID. Nothing if the file is that of another object, which may be a copy of its file.
pub(super) fn metadata(path: &Path, key: &Key) -> Value {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MANIFEST_LIMIT as u64).read_to_end(&mut bytes));
    if read.is_err() {
        return Value::Null;
    }
    let text = String::from_utf8_lossy(&bytes);
    let parsed = |text: &str| {
        let value = serde_saphyr::from_str::<Value>(text).ok()?;
        (Key::of(&value).as_ref() == Some(key)).then_some(value)
    };
    let value = parsed(&text).or_else(|| parsed(head(&text)));
    let Some(Value::Object(mut metadata)) = value.map(|mut value| value["metadata"].take()) else {
        return Value::Null;
    };
    let is_uid = |value: &Value| {
        value
            .as_str()
            .is_some_and(|uid| uuid::Uuid::try_parse(uid).is_ok())
    };
    let is_time = |value: &Value| {
        value
            .as_str()
            .is_some_and(|time| time.parse::<Timestamp>().is_ok())
    };
    let are_owners = |value: &Value| {
        value
            .as_array()
            .is_some_and(|owners| owners.iter().all(|owner| is_uid(&owner["uid"])))
    };
    let mut kept = Map::new();
    for (field, is_well_formed) in [
        ("uid", &is_uid as &dyn Fn(&Value) -> bool),
        ("creationTimestamp", &is_time),
        ("ownerReferences", &are_owners),
    ] {
        if let Some(value) = metadata.remove(field).filter(is_well_formed) {
            kept.insert(field.to_owned(), value);
        }
    }
    Value::Object(kept)
}

/// The text up to the end of its `metadata`: people edit, and break, what follows.
fn head(text: &str) -> &str {
    let mut end = 0;
    let mut in_metadata = false;
    for line in text.split_inclusive('\n') {
        if in_metadata && !line.starts_with([' ', '\n', '#']) {
            break;
        }
        in_metadata |= line.trim_end() == "metadata:";
        end += line.len();
    }
    &text[..end]
}
