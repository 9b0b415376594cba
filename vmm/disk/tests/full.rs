//! A real kernel without space, by a limit of the whole process.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use common::*;
use husk_disk::{Disk, DiskOptions, EngineKind, ErrorPolicy, IoRequest};

/// Held by a test that sets the limit.
static LIMIT: Mutex<()> = Mutex::new(());

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
    let _limit = LIMIT.lock().unwrap_or_else(PoisonError::into_inner);
    for kind in KINDS {
        for disk in disks() {
            held(kind, &disk);
        }
    }
}

#[test]
fn a_flush_succeeds_once_there_is_room_for_the_tables() {
    let _limit = LIMIT.lock().unwrap_or_else(PoisonError::into_inner);
    let file = image(0);
    Disk::create_overlay(open(file.path(), 0).into(), 4 * MIB).unwrap();
    let overlay = || Disk::open_qcow2(open(file.path(), 0).into(), None, reporting()).unwrap();
    let disk = overlay();
    let mut served = serve(EngineKind::Auto, &disk);
    let mut memory = pattern(MIB as usize, 5);
    let expected = memory.clone();
    let buffers = pieces(&mut memory, 4096);
    let write = IoRequest::Write {
        offset: MIB,
        buffers: &buffers,
        durable: false,
    };
    run(&mut served, &[write]).remove(0).unwrap();
    limit(1);
    let full = run(&mut served, &[IoRequest::Flush]).remove(0);
    limit(libc::RLIM_INFINITY);
    assert_eq!(full.unwrap_err().raw_os_error(), Some(libc::EFBIG));
    assert!(!disk.lost_writes());
    run(&mut served, &[IoRequest::Flush]).remove(0).unwrap();
    // As after a power cut.
    let mut back = vec![0; MIB as usize];
    overlay().reader().read_at(MIB, &mut back).unwrap();
    assert!(back == expected);
}

/// Moves the L1 table, of one entry, behind all other clusters.
fn move_l1_table(file: &File, to: u64) {
    const CLUSTER: u64 = 64 << 10;
    let number = |at| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let put = |bytes: &[u8], at| file.write_all_at(bytes, at).unwrap();
    // l1_table_offset and refcount_table_offset of the header.
    let (from, counts) = (number(40), number(number(48)));
    put(&to.to_be_bytes(), 40);
    put(&[0; CLUSTER as usize], to);
    put(&[0, 0], counts + 2 * (from / CLUSTER));
    put(&[0, 1], counts + 2 * (to / CLUSTER));
}

#[test]
fn an_entry_of_the_l1_table_that_was_not_written_is_written_later() {
    let _limit = LIMIT.lock().unwrap_or_else(PoisonError::into_inner);
    let file = image(0);
    Disk::create_overlay(open(file.path(), 0).into(), 4 * MIB).unwrap();
    move_l1_table(file.as_file(), MIB);
    let overlay = || Disk::open_qcow2(open(file.path(), 0).into(), None, reporting()).unwrap();
    let disk = overlay();
    let mut served = serve(EngineKind::Auto, &disk);
    let mut memory = pattern(4096, 5);
    let expected = memory.clone();
    let buffers = pieces(&mut memory, 4096);
    let write = IoRequest::Write {
        offset: MIB,
        buffers: &buffers,
        durable: false,
    };
    limit(MIB);
    let full = [write, IoRequest::Flush].map(|request| run(&mut served, &[request]).remove(0));
    limit(libc::RLIM_INFINITY);
    for result in full {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EFBIG));
    }
    assert!(!disk.lost_writes());
    run(&mut served, &[write]).remove(0).unwrap();
    disk.write_back().unwrap();
    // What a snapshot copies.
    let mut back = vec![0; 4096];
    overlay().reader().read_at(MIB, &mut back).unwrap();
    assert!(back == expected);
}

#[test]
fn the_default_is_to_stop() {
    assert_eq!(DiskOptions::default().error_policy, ErrorPolicy::Stop);
}
