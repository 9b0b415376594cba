//! Volumes that are filled from servers that refuse, break, lie and stall, with images that are damaged or hostile.

mod containerdisks;
mod downloads;
mod formats;
mod qcow2;
mod server;
mod servers;
mod space;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use husk_images::{Event, HttpSource, Request, VolumeRequest, VolumeSource};

const MIB: u64 = 1 << 20;

/// Bytes that do not compress to nothing, and have no zeros.
fn content(length: u64) -> Vec<u8> {
    let mut state = 1_u32;
    let bytes = (0..length).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8 | 1
    });
    bytes.collect()
}

fn http(url: &str) -> HttpSource {
    HttpSource {
        url: url.to_owned(),
        checksum: None,
        certificates: Vec::new(),
        login: None,
        headers: Vec::new(),
    }
}

fn request(directory: &Path, source: VolumeSource, size: Option<u64>) -> VolumeRequest {
    VolumeRequest {
        directory: directory.to_owned(),
        source,
        size,
    }
}

fn start(request: VolumeRequest) -> Child {
    start_with(request, ("NO_PROXY", "localhost"))
}

fn start_with(request: VolumeRequest, (variable, value): (&str, &str)) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_husk-import"))
        .env("HOME", &request.directory)
        .env_remove("REGISTRY_AUTH_FILE")
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("DOCKER_CONFIG")
        .env(variable, value)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let request = serde_json::to_vec(&Request::Volume(request)).unwrap();
    child.stdin.take().unwrap().write_all(&request).unwrap();
    child
}

/// All events of an import.
fn import(request: VolumeRequest) -> Vec<Event> {
    let output = start(request).wait_with_output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The disk of an import that succeeds, which leaves nothing else.
fn filled(directory: &Path, source: VolumeSource, size: Option<u64>) -> Vec<u8> {
    let events = import(request(directory, source, size));
    let Some(Event::Filled { size: said }) = events.last() else {
        panic!("{events:?}")
    };
    assert_eq!(entries(directory), ["disk.img"]);
    let disk = fs::read(directory.join("disk.img")).unwrap();
    assert_eq!(disk.len() as u64, *said);
    assert!(size.is_none_or(|size| size == *said), "{said}");
    disk
}

/// The reason of an import that fails, which leaves no disk.
fn failed(directory: &Path, source: VolumeSource, size: Option<u64>) -> String {
    let events = import(request(directory, source, size));
    let Some(Event::Failed { reason }) = events.last() else {
        panic!("{events:?}")
    };
    assert_eq!(reason.lines().count(), 1, "{reason}");
    let left = entries(directory);
    assert!(!left.iter().any(|name| name.starts_with("disk")), "{left:?}");
    reason.clone()
}

fn entries(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
