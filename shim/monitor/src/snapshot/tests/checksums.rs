use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::*;
use crate::snapshot::chunk_digests::{AfterBatch, CHUNK, ChunkDigest, ChunkedFile};
use crate::snapshot::{CHECKSUMS, Checksums, MEMORY, NewSnapshot, STATE, SnapshotError, verify};

/// Three batches and a part of a chunk.
const MEMORY_BYTES: u64 = 40 * CHUNK + 5000;
const FILES: [&str; 7] = [
    STATE,
    MEMORY,
    "disk-root.qcow2",
    "disk-pulled.qcow2",
    "base-pulled.img",
    "disk-scratch.img",
    "disk-copied.img",
];

struct Saved {
    _home: tempfile::TempDir,
    path: PathBuf,
}

impl Saved {
    /// Makes a snapshot with checksums.
    fn new() -> Saved {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("snap");
        let mut new = NewSnapshot::create(&path).unwrap();
        for name in FILES {
            let file = new.file(name).unwrap();
            match name {
                STATE => file.write_all_at(b"abc", 0).unwrap(),
                MEMORY => {
                    file.set_len(MEMORY_BYTES).unwrap();
                    file.write_all_at(&[1; 4096], 0).unwrap();
                    file.write_all_at(&[2; 70_000], 17 * CHUNK - 1000).unwrap();
                }
                // Without content.
                "disk-scratch.img" => {}
                // A hole at the end.
                "disk-copied.img" => {
                    file.write_all_at(b"data", CHUNK).unwrap();
                    file.set_len(3 * CHUNK).unwrap();
                }
                name => file.write_all_at(name.as_bytes(), 0).unwrap(),
            }
        }
        let snapshot = snapshot();
        let checksums = write(&mut new, &AtomicBool::new(false)).unwrap();
        let snapshot = Snapshot {
            state_bytes: 3,
            memory_bytes: MEMORY_BYTES,
            checksums: Some(checksums),
            ..snapshot
        };
        new.complete(&snapshot).unwrap();
        new.keep();
        Saved { _home: home, path }
    }

    fn open(&self, name: &str) -> File {
        let file = File::options().read(true).write(true).open(self.path.join(name));
        file.unwrap()
    }

    fn verify(&self) -> Result<(), String> {
        let verified = verify(&self.path, &AtomicBool::new(false), &|_, _, _| {});
        verified.map_err(|error| error.to_string().replace(self.path.to_str().unwrap(), "SNAP"))
    }

    fn description(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path.join("snapshot.json")).unwrap()).unwrap()
    }

    /// Inverts bits of a byte.
    fn flip(&self, name: &str, offset: u64, bits: u8) {
        let file = self.open(name);
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ bits], offset).unwrap();
    }
}

fn write(new: &mut NewSnapshot, cancelled: &AtomicBool) -> Result<Checksums, SnapshotError> {
    let sums = new.file(CHECKSUMS).unwrap();
    Checksums::write(&new.dir(), &sums, &snapshot().disks, cancelled, |_, _| {})
}

fn damaged(name: &str, offset: u64) -> Result<(), String> {
    let offset = offset / CHUNK * CHUNK;
    Err(format!(
        "SNAP/{name}: the MiB at byte {offset} is not what was written: the snapshot is damaged"
    ))
}

#[test]
fn what_was_written_is_whole_with_holes_and_without() {
    let saved = Saved::new();
    let steps = RefCell::new(Vec::new());
    let step = |name: &str, done, total| {
        assert!(done <= total);
        steps.borrow_mut().push((name.to_owned(), done, total));
    };
    verify(&saved.path, &AtomicBool::new(false), &step).unwrap();
    for name in FILES {
        let steps = steps.borrow();
        let (_, done, total) = steps.iter().rfind(|step| step.0 == name).unwrap();
        assert_eq!(done, total, "{name}");
    }
    // One digest for each chunk: of the state, the memory, three small files and one of 3 MiB.
    let sums = fs::read(saved.path.join("checksums")).unwrap();
    assert_eq!(sums.len(), 32 * (1 + 41 + 3 + 3));
    let digest = sums[..32].iter().map(|byte| format!("{byte:02x}"));
    assert_eq!(
        digest.collect::<String>(),
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    );

    for name in [MEMORY, "disk-copied.img"] {
        let path = saved.path.join(name);
        let content = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, content).unwrap();
    }
    saved.verify().unwrap();
    // Marks do not touch them.
    let description = saved.description();
    let marked = Snapshot {
        resumed: true,
        ..Snapshot::parse(&serde_json::to_vec(&description).unwrap(), &saved.path).unwrap()
    };
    fs::write(
        saved.path.join("snapshot.json"),
        serde_json::to_vec(&marked).unwrap(),
    )
    .unwrap();
    saved.verify().unwrap();
}

#[test]
fn snapshot_without_checksums_cannot_be_verified() {
    let saved = Saved::new();
    let mut description = saved.description();
    description.as_object_mut().unwrap().remove("checksums");
    fs::write(saved.path.join("snapshot.json"), description.to_string()).unwrap();
    let wanted =
        "SNAP has no checksums: make it with `husk snapshot --checksums`, or leave out --verify".to_owned();
    assert_eq!(saved.verify(), Err(wanted));
    let error = snapshot().check_verifiable(Path::new("/snap")).unwrap_err();
    assert!(error.to_string().starts_with("/snap has no checksums"), "{error}");
}

#[test]
fn files_of_another_size_or_kind_are_refused() {
    let wrong = |change: &dyn Fn(&Saved), wanted: &str| {
        let saved = Saved::new();
        change(&saved);
        let error = saved.verify().unwrap_err();
        assert!(error.starts_with(wanted), "{error}");
    };
    wrong(
        &|saved| saved.open(MEMORY).set_len(MEMORY_BYTES - 1).unwrap(),
        "SNAP/memory has 41948039 bytes, not 41948040: the snapshot is damaged",
    );
    wrong(
        &|saved| saved.open("disk-copied.img").set_len(5 * CHUNK).unwrap(),
        "SNAP/disk-copied.img has 5242880 bytes, not 3145728: the snapshot is damaged",
    );
    wrong(
        &|saved| saved.open("checksums").set_len(0).unwrap(),
        "SNAP/checksums has 0 bytes, not 1536: the snapshot is damaged",
    );
    wrong(
        &|saved| fs::remove_file(saved.path.join("checksums")).unwrap(),
        "SNAP/checksums: No such file",
    );
    wrong(
        &|saved| {
            fs::remove_file(saved.path.join("disk-scratch.img")).unwrap();
            std::os::unix::fs::symlink("/etc/passwd", saved.path.join("disk-scratch.img")).unwrap();
        },
        "SNAP/disk-scratch.img: ",
    );
    wrong(
        &|saved| saved.flip("checksums", 1000, 4),
        "SNAP/checksums is damaged, or snapshot.json is",
    );
}

#[test]
fn file_that_becomes_shorter_while_it_is_read_is_an_error() {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&[1; 100], 0).unwrap();
    let chunked = ChunkedFile {
        file: &file,
        path: Path::new("/memory"),
        bytes: 200,
    };
    let error = chunked.digest(&AtomicBool::new(false), &|_, _| Ok(AfterBatch::GoOn), |_| {});
    assert_eq!(error.unwrap_err().to_string(), "/memory: it has become shorter");
}

#[test]
fn verification_ends_when_it_is_cancelled() {
    let saved = Saved::new();
    let cancelled = AtomicBool::new(false);
    let seen = RefCell::new(Vec::new());
    let ended = verify(&saved.path, &cancelled, &|name, _, _| {
        seen.borrow_mut().push(name.to_owned());
        cancelled.store(name == MEMORY, Ordering::Relaxed);
    });
    match ended.unwrap_err() {
        SnapshotError::Io { path, source } => {
            assert_eq!(path, saved.path.join(MEMORY));
            assert_eq!(source.kind(), std::io::ErrorKind::Interrupted);
        }
        other => panic!("{other}"),
    }
    assert_eq!(seen.borrow().last().map(String::as_str), Some(MEMORY));

    let home = tempfile::tempdir().unwrap();
    let mut new = NewSnapshot::create(&home.path().join("snap")).unwrap();
    for name in FILES {
        new.file(name).unwrap().set_len(1).unwrap();
    }
    write(&mut new, &AtomicBool::new(true)).unwrap_err();
    drop(new);
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn stored_checksums_are_read_and_wrong_ones_refused() {
    let stored = json!({
        "sha256": "00",
        "chunkBytes": 1_048_576,
        "files": [
            {"name": "state.json", "bytes": 61_440},
            {"name": "memory", "bytes": 536_870_912},
            {"name": "disk-root.qcow2", "bytes": 393_216},
            {"name": "disk-pulled.qcow2", "bytes": 0},
            {"name": "base-pulled.img", "bytes": 1},
            {"name": "disk-scratch.img", "bytes": 1},
            {"name": "disk-copied.img", "bytes": 1},
        ],
    });
    let mut document: Value = serde_json::from_str(VERSION_1).unwrap();
    document["stateBytes"] = json!(61_440);
    document["checksums"] = stored;
    let read = parsed(&document).unwrap();
    assert_eq!(serde_json::to_value(read).unwrap(), document);

    let max = json!(u64::MAX);
    for (pointer, value, wanted) in [
        (
            "/chunkBytes",
            json!(0),
            "checksums.chunkBytes: 0 is unknown, not 1048576",
        ),
        ("/chunkBytes", max.clone(), "checksums.chunkBytes: "),
        (
            "/sha256",
            json!(7),
            "invalid type: integer `7`, expected a string",
        ),
        (
            "/files",
            json!([]),
            "checksums.files: they are not those of the snapshot",
        ),
        (
            "/files/1/name",
            json!("../x"),
            "checksums.files: they are not those",
        ),
        (
            "/files/6",
            json!({"name": "snapshot.json", "bytes": 1}),
            "checksums.files: they are not those",
        ),
        (
            "/files/1/bytes",
            json!(7),
            "checksums.files: memory has 7 bytes, not 536870912",
        ),
        ("/files/2/bytes", json!(-1), "invalid value: integer `-1`"),
        ("/files/2/more", json!(1), "unknown field `more`"),
        ("/more", json!(1), "unknown field `more`"),
    ] {
        let mut document = document.clone();
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        match document.pointer_mut(&format!("/checksums{parent}")).unwrap() {
            Value::Array(items) => items[field.parse::<usize>().unwrap()] = value,
            parent => parent[field] = value,
        }
        let error = parsed(&document).unwrap_err();
        assert!(error.contains(wanted), "{pointer}: {error}");
    }
    // Sizes that no file has cost an error when the files are opened.
    document["checksums"]["files"][2]["bytes"] = max;
    parsed(&document).unwrap();
    let saved = Saved::new();
    let mut description = saved.description();
    description["checksums"]["files"][2]["bytes"] = json!(u64::MAX);
    fs::write(saved.path.join("snapshot.json"), description.to_string()).unwrap();
    let error = saved.verify().unwrap_err();
    assert!(
        error.starts_with("SNAP/checksums has 1536 bytes, not "),
        "{error}"
    );
}

/// The digests of a file, by the simplest way.
fn simple(file: &File) -> Vec<ChunkDigest> {
    let mut content = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut content, 0).unwrap();
    let chunks = content.chunks(usize::try_from(CHUNK).unwrap());
    chunks.map(|chunk| Sha256::digest(chunk).into()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn digests_are_those_of_the_content(
        bytes in 0..40 * CHUNK,
        writes in prop::collection::vec((0..40 * CHUNK, 1..3 * CHUNK), 0..4),
    ) {
        let file = tempfile::tempfile().unwrap();
        for (at, length) in writes {
            file.write_all_at(&vec![7; usize::try_from(length).unwrap()], at).unwrap();
        }
        file.set_len(bytes).unwrap();
        let found = Mutex::new(vec![None; usize::try_from(bytes.div_ceil(CHUNK)).unwrap()]);
        let take = |first: u64, digests: &[ChunkDigest]| {
            let first = usize::try_from(first).unwrap();
            for (n, digest) in digests.iter().enumerate() {
                let before = found.lock().unwrap()[first + n].replace(*digest);
                assert_eq!(before, None);
            }
            Ok(AfterBatch::GoOn)
        };
        let chunked = ChunkedFile { file: &file, path: Path::new("/memory"), bytes };
        chunked.digest(&AtomicBool::new(false), &take, |_| {}).unwrap();
        let found: Vec<_> = found.into_inner().unwrap().into_iter().flatten().collect();
        prop_assert!(found == simple(&file));
    }
}

#[test]
fn each_bit_flip_is_found_where_it_is_first() {
    let saved = Saved::new();
    let sizes = FILES.map(|name| fs::metadata(saved.path.join(name)).unwrap().len());
    let place = (0..FILES.len(), any::<prop::sample::Index>(), 1..=u8::MAX);
    let flips = prop::collection::vec(place, 1..4);
    proptest!(ProptestConfig::with_cases(48), |(flips in flips)| {
        // The same byte twice could be as it was.
        let mut applied = BTreeMap::new();
        for (file, at, bits) in flips {
            if sizes[file] > 0 {
                let offset = at.index(usize::try_from(sizes[file]).unwrap()) as u64;
                applied.insert((file, offset), bits);
            }
        }
        let flip_all = || {
            for ((file, offset), bits) in &applied {
                saved.flip(FILES[*file], *offset, *bits);
            }
        };
        flip_all();
        let wanted = match applied.keys().next() {
            Some((file, offset)) => damaged(FILES[*file], *offset),
            None => Ok(()),
        };
        let found = saved.verify();
        flip_all();
        prop_assert_eq!(found, wanted);
    });
    saved.verify().unwrap();
}
