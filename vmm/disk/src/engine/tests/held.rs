//! Requests that fail on the host.

use std::io;

use super::kernel::{BLOCKS, Bench, NONE, SECTORS, bench_of, buffers, drain, geometry, one};
use crate::io_backend::IoCall;
use crate::{DiskCounters, ErrorPolicy, Geometry, IoBuffer, IoRequest, SECTOR};

fn bench(policy: ErrorPolicy) -> Bench {
    bench_of(geometry(NONE), policy, 1, true)
}

fn submit(bench: &mut Bench, tag: u16, request: IoRequest<'_>) {
    // SAFETY: the tests' buffers outlive their benches' use.
    unsafe { bench.engine.submit(tag, bench.disk, request) };
}

fn write(offset: u64, buffers: &[IoBuffer]) -> IoRequest<'_> {
    IoRequest::Write {
        offset,
        buffers,
        durable: false,
    }
}

fn fail(bench: &Bench, errno: Option<i32>) {
    bench.kernel.lock().unwrap().failure = errno;
}

fn fail_syncs(bench: &Bench, errno: Option<i32>) {
    bench.kernel.lock().unwrap().sync_failure = errno;
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(0)
}

#[test]
fn a_stopped_disk_reports_once_and_loses_no_request() {
    let mut bench = bench(ErrorPolicy::Stop);
    let mut memory = vec![7; 8192];
    let pieces = buffers(&mut memory, 4096);
    fail(&bench, Some(libc::EIO));
    submit(&mut bench, 0, write(0, &pieces));
    submit(&mut bench, 1, IoRequest::Flush);
    assert!(drain(&mut bench.engine).is_empty());
    let stopped = bench.engine.take_stopped().unwrap();
    assert_eq!((stopped.disk, errno(&stopped.error)), (bench.disk, libc::EIO));
    assert!(bench.engine.take_stopped().is_none());
    assert!(!bench.engine.is_busy() && bench.engine.in_flight(bench.disk) == 2);
    assert_eq!(
        bench.engine.detach(bench.disk).unwrap_err().kind(),
        io::ErrorKind::ResourceBusy
    );
    // The retry fails, which is reported again.
    bench.engine.retry_held(bench.disk);
    assert!(drain(&mut bench.engine).is_empty());
    assert!(bench.engine.take_stopped().is_some());
    fail(&bench, None);
    bench.engine.retry_held(bench.disk);
    let done = drain(&mut bench.engine);
    assert!(done.iter().any(|c| c.tag == 0 && c.result.is_ok()), "{done:?}");
    assert_eq!(bench.kernel.lock().unwrap().images[0][..8192], [7; 8192]);
}

#[test]
fn a_full_volume_holds_and_other_errors_are_reported() {
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    for (error, held) in [
        (libc::ENOSPC, true),
        (libc::EDQUOT, true),
        (libc::EIO, false),
        (libc::EFBIG, false),
    ] {
        let mut bench = bench(ErrorPolicy::NoSpace);
        fail(&bench, Some(error));
        submit(&mut bench, 0, write(0, &pieces));
        let done = drain(&mut bench.engine);
        assert_eq!(
            (done.is_empty(), bench.engine.take_stopped().is_some()),
            (held, held)
        );
        if held {
            bench.engine.fail_held(bench.disk);
            let done = drain(&mut bench.engine);
            assert_eq!(errno(done[0].result.as_ref().unwrap_err()), error);
        }
        bench.engine.detach(bench.disk).unwrap();
    }
}

#[test]
fn an_ignored_read_error_returns_zeroes() {
    for align in [NONE, BLOCKS] {
        let mut bench = bench_of(geometry(align), ErrorPolicy::Ignore, 3, true);
        fail(&bench, Some(libc::EIO));
        let mut memory = vec![7; 1024];
        let pieces = buffers(&mut memory, 100);
        one(&mut bench, write(512, &pieces)).unwrap();
        one(&mut bench, IoRequest::Flush).unwrap();
        one(
            &mut bench,
            IoRequest::Read {
                offset: 512,
                buffers: &pieces,
            },
        )
        .unwrap();
        assert_eq!(memory, [0; 1024]);
        assert!(bench.engine.take_stopped().is_none());
        // The guest is told success, but it is none.
        assert_eq!(bench.image.counters(), DiskCounters::default());
        let beyond = IoRequest::Read {
            offset: SECTORS * SECTOR,
            buffers: &buffers(&mut [0; 512], 512),
        };
        assert!(one(&mut bench, beyond).is_err(), "the guest's own fault");
    }
}

#[test]
fn a_flush_that_failed_in_the_page_cache_fails_for_good() {
    for (align, write_cache, lasts) in [(NONE, true, true), (NONE, false, false), (BLOCKS, true, false)] {
        let geometry = Geometry {
            write_cache,
            ..geometry(align)
        };
        let mut bench = bench_of(geometry, ErrorPolicy::Report, 1, true);
        fail(&bench, Some(libc::EIO));
        assert!(one(&mut bench, IoRequest::Flush).is_err());
        fail(&bench, None);
        let again = one(&mut bench, IoRequest::Flush);
        assert_eq!(again.err().map(|e| errno(&e)), lasts.then_some(libc::EIO));
        // Other engines of the disk report it, too.
        assert_eq!(bench.image.flush_error(), if lasts { libc::EIO } else { 0 });
    }
}

#[test]
fn enospc_on_a_durable_write_is_not_a_lost_write() {
    let mut bench = bench(ErrorPolicy::NoSpace);
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    let durable = IoRequest::Write {
        offset: 0,
        buffers: &pieces,
        durable: true,
    };
    fail(&bench, Some(libc::ENOSPC));
    submit(&mut bench, 0, durable);
    assert!(drain(&mut bench.engine).is_empty());
    fail(&bench, None);
    bench.engine.retry_held(bench.disk);
    assert!(drain(&mut bench.engine)[0].result.is_ok());
    one(&mut bench, IoRequest::Flush).unwrap();
}

#[test]
fn any_error_of_a_durable_writes_sync_may_be_of_an_earlier_write() {
    for errno in [libc::EIO, libc::ENOSPC, libc::EDQUOT] {
        let mut bench = bench(ErrorPolicy::Report);
        let mut memory = vec![7; 512];
        let pieces = buffers(&mut memory, 512);
        let durable = IoRequest::Write {
            offset: 0,
            buffers: &pieces,
            durable: true,
        };
        fail_syncs(&bench, Some(errno));
        assert!(one(&mut bench, durable).is_err());
        fail_syncs(&bench, None);
        assert!(one(&mut bench, IoRequest::Flush).is_err());
    }
}

/// Without a write cache nothing else is lost.
#[test]
fn a_durable_write_whose_sync_failed_is_written_again() {
    for fallocate in [false, true] {
        let geometry = Geometry {
            write_cache: false,
            ..geometry(NONE)
        };
        let mut bench = bench_of(geometry, ErrorPolicy::NoSpace, 1, fallocate);
        let mut memory = vec![7; 8192];
        let pieces = buffers(&mut memory, 1000);
        let zero = IoRequest::WriteZeroes {
            offset: 8192,
            len: 8192,
            unmap: false,
            durable: false,
        };
        fail_syncs(&bench, Some(libc::ENOSPC));
        submit(&mut bench, 0, write(0, &pieces));
        submit(&mut bench, 1, zero);
        assert!(drain(&mut bench.engine).is_empty());
        // The page cache drops what it could not write.
        bench.kernel.lock().unwrap().images[0].fill(0xdd);
        fail_syncs(&bench, None);
        bench.engine.retry_held(bench.disk);
        let done = drain(&mut bench.engine);
        assert!(
            done.len() == 2 && done.iter().all(|c| c.result.is_ok()),
            "{done:?}"
        );
        let kernel = bench.kernel.lock().unwrap();
        assert_eq!(kernel.images[0][..8192], [7; 8192]);
        assert_eq!(kernel.images[0][8192..16384], [0; 8192]);
    }
}

#[test]
fn a_held_durable_write_is_written_again_if_a_sync_failed_meanwhile() {
    let geometry = Geometry {
        write_cache: false,
        ..geometry(NONE)
    };
    let mut bench = bench_of(geometry, ErrorPolicy::NoSpace, 1, true);
    let mut memory: Vec<u8> = (0..8192).map(|i| (i / 100) as u8).collect();
    let expected = memory.clone();
    let pieces = buffers(&mut memory, 1000);
    bench.kernel.lock().unwrap().room = Some(1500);
    submit(&mut bench, 0, write(0, &pieces));
    assert!(drain(&mut bench.engine).is_empty());
    fail_syncs(&bench, Some(libc::EIO));
    assert!(one(&mut bench, IoRequest::Flush).is_err());
    fail_syncs(&bench, None);
    {
        let mut kernel = bench.kernel.lock().unwrap();
        // The page cache drops what it could not write.
        kernel.images[0].fill(0xdd);
        kernel.room = None;
    }
    bench.engine.retry_held(bench.disk);
    assert!(drain(&mut bench.engine)[0].result.is_ok());
    assert!(bench.kernel.lock().unwrap().images[0][..8192] == expected);
}

/// More requests than bounce buffers, and some of one block.
#[test]
fn requests_that_wait_for_held_requests_are_held_too() {
    let mut bench = bench_of(geometry(BLOCKS), ErrorPolicy::Stop, 5, true);
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    fail(&bench, Some(libc::ENOSPC));
    for tag in 0..16u16 {
        submit(
            &mut bench,
            tag,
            write(u64::from(tag / 2) * 8192 + u64::from(tag % 2) * 512, &pieces),
        );
    }
    assert!(drain(&mut bench.engine).is_empty());
    assert!(!bench.engine.is_busy());
    assert!(bench.kernel.lock().unwrap().calls.len() < 16);
    fail(&bench, None);
    bench.engine.retry_held(bench.disk);
    assert_eq!(drain(&mut bench.engine).len(), 16);
    assert_eq!((bench.engine.bounces, bench.engine.waiting.len()), (0, 0));
    let kernel = bench.kernel.lock().unwrap();
    for block in 0..8 {
        assert_eq!(kernel.images[0][block * 8192..][..1024], [7; 1024]);
    }
}

#[test]
fn held_requests_can_be_failed() {
    let mut bench = bench_of(geometry(BLOCKS), ErrorPolicy::Stop, 5, true);
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    fail(&bench, Some(libc::EIO));
    for tag in 0..16u16 {
        submit(&mut bench, tag, write(u64::from(tag) * 512, &pieces));
    }
    assert!(drain(&mut bench.engine).is_empty());
    // The waiting request is tried, and its error reported.
    bench
        .engine
        .set_error_policy(bench.disk, ErrorPolicy::Report)
        .unwrap();
    bench.engine.fail_held(bench.disk);
    let done = drain(&mut bench.engine);
    assert!(done.len() == 16 && done.iter().all(|c| c.result.is_err()));
    bench.engine.detach(bench.disk).unwrap();
    assert!(bench.engine.take_stopped().is_none(), "of a disk that is gone");
    assert_eq!(bench.engine.bounces, 0);
}

#[test]
fn a_retry_respects_a_disk_that_shrank() {
    let mut bench = bench(ErrorPolicy::Stop);
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    fail(&bench, Some(libc::EIO));
    submit(&mut bench, 0, write(0, &pieces));
    submit(&mut bench, 1, write(SECTORS * SECTOR - 512, &pieces));
    assert!(drain(&mut bench.engine).is_empty());
    fail(&bench, None);
    bench.image.set_size(SECTORS * SECTOR / 2);
    bench.engine.retry_held(bench.disk);
    let mut done = drain(&mut bench.engine);
    done.sort_by_key(|c| c.tag);
    assert!(done[0].result.is_ok());
    assert_eq!(
        done[1].result.as_ref().unwrap_err().kind(),
        io::ErrorKind::InvalidInput
    );
    let calls = &bench.kernel.lock().unwrap().calls;
    let beyond =
        |call: &&IoCall| matches!(call, IoCall::Write { offset, .. } if *offset > SECTORS * SECTOR / 2);
    assert_eq!(calls.iter().filter(beyond).count(), 1);
}
