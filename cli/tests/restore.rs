//! `husk restore --verify` before it starts a VM.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::{husk, told};

const DESCRIPTION: &str = include_str!("../../shim/monitor/src/snapshot/fixtures/version-1.json");
const MIB: usize = 1 << 20;

/// A snapshot of a VM without disks and interfaces.
fn snapshot(home: &Path, memory: u64) -> PathBuf {
    let dir = home.join("snap");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("state.json"), "state").unwrap();
    let file = File::create(dir.join("memory")).unwrap();
    file.write_all_at(b"memory", 0).unwrap();
    file.set_len(memory).unwrap();
    let mut document: Value = serde_json::from_str(DESCRIPTION).unwrap();
    document["disks"] = json!([]);
    document["plan"]["disks"] = json!([]);
    document["plan"]["nics"] = json!([]);
    document["stateBytes"] = json!(5);
    document["memoryBytes"] = json!(memory);
    write(&dir, &document);
    dir
}

fn write(dir: &Path, document: &Value) {
    fs::write(dir.join("snapshot.json"), document.to_string()).unwrap();
}

/// Adds checksums, by the simplest way.
fn with_checksums(dir: &Path) {
    let text = fs::read(dir.join("snapshot.json")).unwrap();
    let mut document: Value = serde_json::from_slice(&text).unwrap();
    let (mut sums, mut files) = (Vec::new(), Vec::new());
    for name in ["state.json", "memory"] {
        let content = fs::read(dir.join(name)).unwrap();
        for chunk in content.chunks(MIB) {
            sums.extend_from_slice(&Sha256::digest(chunk));
        }
        files.push(json!({"name": name, "bytes": content.len()}));
    }
    let sha256 = format!("{:x}", Sha256::digest(&sums));
    document["checksums"] = json!({"sha256": sha256, "chunkBytes": MIB, "files": files});
    fs::write(dir.join("checksums"), sums).unwrap();
    write(dir, &document);
}

fn restore(home: &Path, dir: &Path) -> Output {
    let mut command = husk(&home.join("run"), &["restore", dir.to_str().unwrap(), "--verify"]);
    // Only the VM's monitor opens it.
    command.env("HUSK_KVM", "/dev/null").output().unwrap()
}

#[test]
fn snapshot_without_checksums_is_refused_at_once() {
    let home = tempfile::tempdir().unwrap();
    let dir = snapshot(home.path(), 4096);
    let said = format!(
        "error: {} has no checksums: make it with `husk snapshot --checksums`, or leave out --verify\n",
        dir.display()
    );
    assert_eq!(told(&restore(home.path(), &dir)), (1, String::new(), said));
}

#[test]
fn damaged_snapshot_is_not_started() {
    let home = tempfile::tempdir().unwrap();
    let dir = snapshot(home.path(), 3 << 20);
    with_checksums(&dir);
    let memory = File::options().write(true).open(dir.join("memory")).unwrap();
    let checked = "demo: checking state.json (5 B)\ndemo: checking memory (";
    let (code, _, stderr) = told(&restore(home.path(), &dir));
    // /dev/null is no KVM device.
    assert!(
        code == 1 && stderr.starts_with(checked) && stderr.contains("\ndemo: starting"),
        "{stderr}"
    );
    memory.write_all_at(b"x", 2_500_000).unwrap();
    let (code, _, stderr) = told(&restore(home.path(), &dir));
    let said = format!(
        "error: {}/memory: the MiB at byte 2097152 is not what was written: the snapshot is damaged\n",
        dir.display()
    );
    assert!(
        code == 1 && stderr.starts_with(checked) && stderr.ends_with(&said),
        "{stderr}"
    );
    assert_eq!(stderr.lines().count(), 3, "{stderr}");
}
