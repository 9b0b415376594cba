//! Feeds the description of a snapshot with changed values to its reader. Asserts that a description which is accepted
//! is written as it was read, and names only files of the snapshot's directory.

#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use arbitrary::Arbitrary;
use husk_fuzz::json::Mutation;
use husk_monitor::snapshot::Snapshot;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    mutations: Vec<Mutation>,
    checksums: Option<Sums>,
    plugged: bool,
    cut: Option<u16>,
    raw: Option<&'a [u8]>,
}

/// The checksums of the two files that every snapshot has.
#[derive(Arbitrary, Debug)]
struct Sums {
    chunk_bytes: Option<u64>,
    state: Option<u64>,
    memory: Option<u64>,
}

static STORED: LazyLock<Value> = LazyLock::new(|| {
    let text = include_str!("../../shim/monitor/src/snapshot/fixtures/version-1.json");
    serde_json::from_str(text).expect("JSON")
});

/// Names of the files in a document that it was written to.
fn files<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| files(item, found)),
        Value::Object(fields) => {
            if let (Some(Value::String(name)), Some(_)) = (fields.get("file"), fields.get("format")) {
                found.push(name);
            }
            fields.values().for_each(|field| files(field, found));
        }
        _ => {}
    }
}

fuzz_target!(|input: Input<'_>| {
    let mut document = STORED.clone();
    if input.plugged {
        document["interfaces"] = serde_json::json!([{
            "name": "red", "device": "net1", "mac": document["plan"]["nics"][0]["mac"],
            "queues": 1, "linkUp": true, "pciSlot": 9,
        }]);
    }
    if let Some(sums) = &input.checksums {
        let names = file_names(&document);
        let mut files: Vec<Value> = names
            .iter()
            .map(|name| serde_json::json!({"name": name, "bytes": 5}))
            .collect();
        files[0]["bytes"] = sums
            .state
            .map_or_else(|| document["stateBytes"].clone(), Value::from);
        files[1]["bytes"] = sums
            .memory
            .map_or_else(|| document["memoryBytes"].clone(), Value::from);
        document["checksums"] = serde_json::json!({
            "sha256": "0".repeat(64), "chunkBytes": sums.chunk_bytes.unwrap_or(1 << 20), "files": files,
        });
    }
    input
        .mutations
        .iter()
        .take(4)
        .for_each(|mutation| mutation.apply(&mut document));
    let mut text = serde_json::to_vec(&document).expect("JSON");
    if let Some(len) = input.cut {
        text.truncate(len.into());
    }
    let path = Path::new("/snap");
    let parsed = Snapshot::parse(input.raw.unwrap_or(&text), path);
    let snapshot = match parsed {
        Ok(snapshot) => snapshot,
        Err(error) => return assert!(error.to_string().starts_with("/snap")),
    };
    let written = serde_json::to_value(&snapshot).expect("JSON");
    let again = Snapshot::parse(&serde_json::to_vec(&written).expect("JSON"), path);
    assert_eq!(again.expect("what was written is read"), snapshot);
    let mut names = Vec::new();
    files(&written["disks"], &mut names);
    for name in names {
        assert!(!name.contains(['/', '\0']) && !name.starts_with('.') && !name.is_empty());
        assert!(!["snapshot.json", "state.json", "memory", "checksums"].contains(&name));
    }
    let _ = snapshot.check_restorable(path).map_err(|error| error.to_string());
    let _ = snapshot.check_verifiable(path);
    let _ = snapshot
        .plan_for("default", "copy", false)
        .map_err(|error| error.to_string());
    let _ = snapshot.metadata_for("default", "copy");
    let disks = snapshot.plan.disks.len();
    assert!(snapshot.unsaved_volumes().len() <= disks && snapshot.written_copies().len() <= disks);
    assert!(snapshot.interface_names().all(|name| !name.is_empty()));
});

/// The files of a snapshot, in order.
fn file_names(document: &Value) -> Vec<String> {
    let mut names = Vec::new();
    for disk in document["disks"].as_array().into_iter().flatten() {
        let held = &disk["content"]["held"];
        for name in [&held["image"]["file"], &held["base"]["held"]["file"]] {
            names.extend(name.as_str());
        }
    }
    ["state.json", "memory"]
        .into_iter()
        .chain(names)
        .map(str::to_owned)
        .collect()
}
