//! A real kernel without space, by a limit of the whole process.

mod common;

use common::*;
use husk_disk::{Disk, DiskOptions, EngineKind, ErrorPolicy, IoRequest};

/// Bounds what this process can write of any file; writing beyond is EFBIG.
fn limit(bytes: libc::rlim_t) {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: one rlimit is read or written at a time; the signal is ignored, so that the call fails instead.
    let failed = unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) < 0 || {
            limit.rlim_cur = bytes;
            libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) < 0
        }
    };
    assert!(!failed);
}

/// A raw disk of 4 MiB, and an overlay that grows to that size.
fn disks() -> [Disk; 2] {
    let raw = disk(&image(4 * MIB), 0, DiskOptions::default());
    let overlay = image(0);
    Disk::create_overlay(open(overlay.path(), 0).into(), 4 * MIB).unwrap();
    let overlay = Disk::open_qcow2(open(overlay.path(), 0).into(), None, DiskOptions::default());
    [raw, overlay.unwrap()]
}

fn held(kind: EngineKind, disk: &Disk) {
    let mut served = serve(kind, disk);
    let expected = pattern(2 * MIB as usize, 9);
    let mut memory = expected.clone();
    let buffers = pieces(&mut memory, 1000);
    let write = IoRequest::Write {
        offset: MIB,
        buffers: &buffers,
        durable: false,
    };
    limit(2 * MIB);
    // SAFETY: the memory outlives the engine's use of it.
    unsafe { served.engine.submit(5, served.disk, write) };
    served.engine.kick().unwrap();
    let mut stopped = None;
    while stopped.is_none() {
        assert!(served.engine.complete().is_none());
        served.engine.kick().unwrap();
        stopped = served.engine.take_stopped();
        if stopped.is_none() {
            served.engine.wait();
        }
    }
    limit(libc::RLIM_INFINITY);
    let stopped = stopped.unwrap();
    assert_eq!(stopped.error.raw_os_error(), Some(libc::EFBIG));
    assert!(!served.engine.is_busy());
    served.engine.retry_held(stopped.disk);
    served.engine.kick().unwrap();
    let done = loop {
        match served.engine.complete() {
            Some(done) => break done,
            None => {
                served.engine.kick().unwrap();
                served.engine.wait();
            }
        }
    };
    done.result.unwrap();
    let mut back = vec![0; 2 * MIB as usize];
    disk.reader().read_at(MIB, &mut back).unwrap();
    assert!(back == expected);
}

#[test]
fn a_write_is_held_until_there_is_room() {
    for kind in KINDS {
        for disk in disks() {
            held(kind, &disk);
        }
    }
}

#[test]
fn the_default_is_to_stop() {
    assert_eq!(DiskOptions::default().error_policy, ErrorPolicy::Stop);
}
