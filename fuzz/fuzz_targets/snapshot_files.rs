//! The directory of a snapshot: its description with changed values, and its files and checksums with changed bytes.
//! Asserts that a description which is read can be used, that a verified snapshot is undamaged, and that damage is found.
#![no_main]

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use arbitrary::Arbitrary;
use husk_fuzz::host::{JsonEdit, Splice, directory, edit_json, splice};
use husk_fuzz::oci::sha256;
use husk_monitor::monitor::testing::open_snapshot;
use husk_monitor::snapshot::{Snapshot, read, verify};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Bytes with a digest.
const CHUNK: usize = 1 << 20;

/// Digest of a hole.
static ZEROS: LazyLock<[u8; 32]> = LazyLock::new(|| Sha256::digest(vec![0; CHUNK]).into());

const VERSION_1: &str = include_str!("../../shim/monitor/src/snapshot/fixtures/version-1.json");

const WORDS: &[&str] = &[
    "version",
    "husk",
    "time",
    "plan",
    "vmi",
    "stateBytes",
    "memoryBytes",
    "disks",
    "interfaces",
    "resumed",
    "consumed",
    "checksums",
    "sha256",
    "chunkBytes",
    "files",
    "name",
    "bytes",
    "plugged",
    "content",
    "remade",
    "held",
    "outside",
    "image",
    "base",
    "blockSizes",
    "logical",
    "physical",
    "file",
    "format",
    "raw",
    "qcow2",
    "device",
    "mac",
    "queues",
    "linkUp",
    "pciSlot",
    "source",
    "descriptor",
    "hostDisk",
    "containerDisk",
    "path",
    "emptyDisk",
    "capacityBytes",
    "root",
    "pulled",
    "data",
    "memory",
    "state.json",
    "snapshot.json",
    "checksums",
    "../x",
    "/x",
    "",
    "net1",
    "02:00:00:00:00:07",
    "nics",
    "topology",
    "sockets",
    "bridge",
    "default",
    "demo",
    "disk-root.qcow2",
];

#[derive(Arbitrary, Debug)]
struct Program {
    /// Without the disks outside, and with files and checksums of the description.
    complete: bool,
    description: Vec<JsonEdit>,
    text: Vec<Splice>,
    files: Vec<Change>,
}

#[derive(Arbitrary, Debug)]
struct Change {
    file: u8,
    kind: Kind,
}

#[derive(Arbitrary, Debug)]
enum Kind {
    Bytes(Vec<Splice>),
    /// Another byte at an offset of the file.
    Byte(u32, u8),
    Remove,
    Link,
    Directory,
    Length(u32),
}

/// Writes the files of a description, and describes them in it.
fn complete(description: &mut Value, directory: &Path) -> Vec<String> {
    for list in ["/disks", "/plan/disks"] {
        let disks = description
            .pointer_mut(list)
            .and_then(Value::as_array_mut)
            .expect("a list");
        disks.retain(|disk| disk["name"] == "scratch" || disk["name"] == "copied");
    }
    let mut names = vec!["state.json".to_owned(), "memory".to_owned()];
    for disk in description["disks"].as_array().expect("a list") {
        names.push(
            disk["content"]["held"]["image"]["file"]
                .as_str()
                .expect("a file")
                .to_owned(),
        );
    }
    let (mut sums, mut files): (Vec<u8>, Vec<Value>) = (Vec::new(), Vec::new());
    for (n, name) in names.iter().enumerate() {
        let content = [n as u8 + 1; 300];
        let file = fs::File::create(directory.join(name)).expect("made");
        // Memory begins with a hole.
        let hole = if name == "memory" { CHUNK } else { 0 };
        if hole > 0 {
            sums.extend(ZEROS.iter());
        }
        file.write_all_at(&content, hole as u64).expect("written");
        sums.extend(Sha256::digest(content));
        files.push(json!({"name": name, "bytes": hole + content.len()}));
    }
    description["stateBytes"] = files[0]["bytes"].clone();
    description["memoryBytes"] = files[1]["bytes"].clone();
    description["checksums"] = json!({"sha256": sha256(&sums), "chunkBytes": CHUNK, "files": files});
    fs::write(directory.join("checksums"), sums).expect("written");
    names.push("checksums".to_owned());
    names
}

fn change(path: &Path, change: &Kind) {
    let mut bytes = fs::read(path).unwrap_or_default();
    match change {
        Kind::Bytes(splices) => splice(&mut bytes, splices),
        Kind::Byte(at, byte) if !bytes.is_empty() => {
            let at = *at as usize % bytes.len();
            bytes[at] = *byte;
        }
        Kind::Byte(..) => {}
        Kind::Length(length) => bytes.resize(*length as usize % (2 * CHUNK), 0),
        Kind::Remove | Kind::Link | Kind::Directory => {
            let _ = fs::remove_file(path);
            let _ = match change {
                Kind::Link => std::os::unix::fs::symlink("/proc/version", path),
                Kind::Directory => fs::create_dir(path),
                _ => Ok(()),
            };
            return;
        }
    }
    // Not through a link of an earlier change.
    let _ = fs::remove_file(path);
    let _ = fs::write(path, bytes);
}

fuzz_target!(|program: Program| {
    let home = directory();
    let directory = home.path();
    let mut description: Value = serde_json::from_str(VERSION_1).expect("JSON");
    let mut names = Vec::new();
    if program.complete {
        names = complete(&mut description, directory);
    }
    let whole = description.clone();
    edit_json(&mut description, &program.description, WORDS);
    let mut text = description.to_string().into_bytes();
    splice(&mut text, &program.text);
    fs::write(directory.join("snapshot.json"), &text).expect("written");
    let before: Vec<_> = names
        .iter()
        .map(|name| fs::read(directory.join(name)).ok())
        .collect();
    if !names.is_empty() {
        for Change { file, kind } in program.files.iter().take(4) {
            change(&directory.join(&names[usize::from(*file) % names.len()]), kind);
        }
    }
    if let Ok(snapshot) = read(directory) {
        let _ = snapshot.check_restorable(directory);
        let _ = (
            snapshot.unsaved_volumes(),
            snapshot.written_copies(),
            snapshot.interface_names().count(),
        );
        if let Ok(plan) = snapshot.plan_for("other", "copy", false) {
            assert_eq!((plan.namespace.as_str(), plan.name.as_str()), ("other", "copy"));
        }
        let replugged = snapshot.plan_for("other", "copy", true).expect("other addresses");
        assert!(
            replugged
                .nics
                .iter()
                .all(|nic| nic.mac.is_some_and(|mac| mac[0] & 3 == 2))
        );
        let _ = snapshot.metadata_for("other", "copy");
        let written = serde_json::to_vec(&snapshot).expect("JSON");
        assert_eq!(
            serde_json::from_slice::<Snapshot>(&written).expect("read").plan,
            snapshot.plan
        );
    }
    let opened = open_snapshot(directory);
    if program.complete {
        let verified = verify(directory, &AtomicBool::new(false), &|_, _, _| {});
        let unchanged = names
            .iter()
            .zip(&before)
            .all(|(name, before)| fs::read(directory.join(name)).ok() == *before);
        if description == whole && program.text.is_empty() {
            assert_eq!(verified.is_ok(), unchanged, "{verified:?}");
            assert!(opened.is_ok() || !unchanged);
        }
    }
});
