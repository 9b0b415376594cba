//! Real files, and engines that serve them.
#![allow(dead_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use husk_disk::{Disk, DiskId, DiskOptions, Engine, EngineKind, ErrorPolicy, IoBuffer, IoRequest};

pub const MIB: u64 = 1 << 20;
pub const KINDS: [EngineKind; 2] = [EngineKind::Uring, EngineKind::Threads];

pub fn image(size: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(size).unwrap();
    file
}

pub fn open(path: &Path, flags: i32) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(path)
        .unwrap()
}

pub fn disk(file: &tempfile::NamedTempFile, flags: i32, options: DiskOptions) -> Disk {
    Disk::open_raw(open(file.path(), flags).into(), options).unwrap()
}

/// An engine that serves one disk.
pub struct Served {
    pub engine: Engine,
    pub disk: DiskId,
}

pub fn serve(kind: EngineKind, disk: &Disk) -> Served {
    let mut engine = Engine::new(kind, 128, 1).unwrap();
    let disk = engine.attach(disk).unwrap();
    Served { engine, disk }
}

/// Submits, and waits until as many requests as were submitted are done.
pub fn run(served: &mut Served, requests: &[IoRequest<'_>]) -> Vec<io::Result<()>> {
    let requests: Vec<_> = requests.iter().map(|request| (served.disk, *request)).collect();
    run_on(&mut served.engine, &requests)
}

/// Likewise, to several disks.
pub fn run_on(engine: &mut Engine, requests: &[(DiskId, IoRequest<'_>)]) -> Vec<io::Result<()>> {
    let mut results: Vec<Option<io::Result<()>>> = requests.iter().map(|_| None).collect();
    for (tag, (disk, request)) in requests.iter().enumerate() {
        // SAFETY: the callers' buffers outlive this function, which waits for the completions.
        unsafe { engine.submit(tag as u16, *disk, *request) };
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while results.iter().any(Option::is_none) {
        assert!(Instant::now() < deadline, "requests hang: {results:?}");
        while let Some(done) = engine.complete() {
            results[usize::from(done.tag)] = Some(done.result);
        }
        engine.kick().unwrap();
        let mut poll = libc::pollfd {
            fd: engine.event().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd is passed and announced.
        unsafe { libc::poll(&raw mut poll, 1, 100) };
    }
    results.into_iter().flatten().collect()
}

pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed)
        .collect()
}

pub fn pieces(memory: &mut [u8], step: usize) -> Vec<IoBuffer> {
    memory
        .chunks_mut(step)
        .map(|c| IoBuffer::new(c.as_mut_ptr(), c.len()))
        .collect()
}

/// Errors are for the test to see.
pub fn reporting() -> DiskOptions {
    DiskOptions {
        error_policy: ErrorPolicy::Report,
        ..DiskOptions::default()
    }
}
