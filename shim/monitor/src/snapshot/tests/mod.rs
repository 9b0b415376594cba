//! Tests of the format, the directory, the disks, the checksums and the interfaces.

mod checksums;
mod directory;
mod disks;
mod format;
mod interfaces;

use std::path::Path;

use serde_json::Value;

use super::Snapshot;

/// A description of version 1 as it was written. It stays as it is: later versions read it.
const VERSION_1: &str = include_str!("../fixtures/version-1.json");

/// The document, with the value at this pointer changed.
fn changed(pointer: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut document: Value = serde_json::from_str(VERSION_1).unwrap();
    change(document.pointer_mut(pointer).unwrap());
    document
}

fn parsed(document: &Value) -> Result<Snapshot, String> {
    let text = serde_json::to_vec(document).unwrap();
    Snapshot::parse(&text, Path::new("/snap")).map_err(|error| error.to_string())
}

/// A snapshot without a disk outside of it.
fn snapshot() -> Snapshot {
    let mut document: Value = serde_json::from_str(VERSION_1).unwrap();
    for list in ["/disks", "/plan/disks"] {
        let disks = document.pointer_mut(list).unwrap().as_array_mut().unwrap();
        disks.retain(|disk| disk["name"] != "data");
    }
    parsed(&document).unwrap()
}

/// A snapshot whose disk `data` is outside of it.
fn with_data_outside() -> Snapshot {
    Snapshot::parse(VERSION_1.as_bytes(), Path::new("/snap")).unwrap()
}
