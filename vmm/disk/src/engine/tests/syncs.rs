//! Syncs at the same time, of one engine and of two.

use std::io;
use std::mem::ManuallyDrop;
use std::thread;

use super::kernel::{NONE, buffers, geometry};
use crate::testing::{BackendScript, CallKind};
use crate::{Disk, DiskId, Engine, ErrorPolicy, Geometry, IoBuffer, IoRequest};

struct Served {
    engine: ManuallyDrop<Engine>,
    script: BackendScript,
    disk: DiskId,
}

fn serve(disk: &Disk) -> Served {
    let (mut engine, script) = BackendScript::engine(8);
    let disk = engine.attach(disk).unwrap();
    let engine = ManuallyDrop::new(engine);
    Served { engine, script, disk }
}

impl Drop for Served {
    fn drop(&mut self) {
        // A failed test ends no calls, for which the engine would wait.
        if !thread::panicking() {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.engine) };
        }
    }
}

fn disk(write_cache: bool) -> Disk {
    let geometry = Geometry {
        write_cache,
        ..geometry(NONE)
    };
    Disk::without_image(geometry, ErrorPolicy::Report)
}

impl Served {
    fn start(&mut self, tag: u16, request: IoRequest<'_>) {
        // SAFETY: no call reads the buffers.
        unsafe { self.engine.submit(tag, self.disk, request) };
        self.engine.kick().unwrap();
    }

    /// Starts a durable write, up to its sync.
    fn write(&mut self, tag: u16, buffers: &[IoBuffer]) {
        let (offset, durable) = (0, true);
        self.start(
            tag,
            IoRequest::Write {
                offset,
                buffers,
                durable,
            },
        );
        self.script.finish(tag, Ok(()));
        assert!(self.engine.complete().is_none());
    }

    /// Ends the call of a request. Returns the requests that end by it, and their errors.
    fn finish(&mut self, tag: u16, result: Result<(), i32>) -> Vec<(u16, Option<i32>)> {
        self.script.finish(tag, result);
        let errno = |error: io::Error| error.raw_os_error().unwrap();
        let ended = std::iter::from_fn(|| self.engine.complete());
        ended
            .map(|done| (done.tag, done.result.err().map(errno)))
            .collect()
    }

    fn syncs(&self) -> usize {
        let made = self.script.made();
        made.iter().filter(|call| call.what == CallKind::Sync).count()
    }
}

const EIO: Option<i32> = Some(libc::EIO);

#[test]
fn requests_that_wait_share_the_next_sync() {
    let mut served = serve(&disk(true));
    for tag in 0..4 {
        served.start(tag, IoRequest::Flush);
    }
    assert_eq!(served.syncs(), 1);
    assert_eq!(served.finish(0, Ok(())), [(0, None)]);
    assert_eq!(served.syncs(), 2);
    assert_eq!(served.finish(1, Ok(())), [(1, None), (2, None), (3, None)]);
    assert_eq!(served.syncs(), 2);
}

#[test]
fn a_sync_that_fails_fails_the_requests_that_wait_for_the_next_one() {
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    for write_cache in [true, false] {
        let mut served = serve(&disk(write_cache));
        for tag in 0..3 {
            served.write(tag, &pieces);
        }
        assert_eq!(served.finish(0, Err(libc::EIO)), [(0, EIO)]);
        // The first sync took the error of their writes, perhaps.
        assert_eq!(served.finish(1, Ok(())), [(1, EIO), (2, EIO)]);
        served.write(3, &pieces);
        assert_eq!(served.finish(3, Ok(())), [(3, None)]);
    }
}

#[test]
fn a_sync_counts_once_those_of_other_engines_beside_it_have_ended() {
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    for (write_cache, error) in [(true, None), (true, EIO), (false, None), (false, EIO)] {
        let disk = disk(write_cache);
        let [mut first, mut second] = [serve(&disk), serve(&disk)];
        for served in [&mut first, &mut second] {
            match write_cache {
                true => served.start(0, IoRequest::Flush),
                false => served.write(0, &pieces),
            }
        }
        // It may have lost its error to the other one, whose result is not known.
        assert_eq!(second.finish(0, Ok(())), []);
        // Nor is that of the second one's next sync for the first one.
        match error {
            None => assert_eq!(first.finish(0, Ok(())), []),
            Some(errno) => assert_eq!(first.finish(0, Err(errno)), [(0, EIO)]),
        }
        // The first one's next sync began too late to take an error.
        assert_eq!(second.finish(0, Ok(())), [(0, error)]);
        if error.is_none() {
            assert_eq!(first.finish(0, Ok(())), [(0, None)]);
        }
    }
}

#[test]
fn a_write_may_take_the_error_of_earlier_ones() {
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    for (late_errors, write_cache, errno) in [
        (true, true, libc::ENOSPC),
        (true, false, libc::EDQUOT),
        (true, true, libc::ENOMEM),
        (false, true, libc::ENOSPC),
        (false, false, libc::ENOSPC),
    ] {
        let geometry = Geometry {
            write_cache,
            late_errors,
            ..geometry(NONE)
        };
        let mut served = serve(&Disk::without_image(geometry, ErrorPolicy::Report));
        served.write(0, &pieces);
        let second = IoRequest::Write {
            offset: 4096,
            buffers: &pieces,
            durable: false,
        };
        served.start(1, second);
        assert_eq!(served.finish(1, Err(errno)), [(1, Some(errno))]);
        let lost = (late_errors && errno != libc::ENOMEM).then_some(errno);
        assert_eq!(served.finish(0, Ok(())), [(0, lost)]);
        served.start(2, IoRequest::Flush);
        assert_eq!(served.finish(2, Ok(())), [(2, lost.filter(|_| write_cache))]);
    }
}

#[test]
fn the_last_sync_of_an_engine_counts() {
    let disk = disk(true);
    let [mut first, mut second] = [serve(&disk), serve(&disk)];
    for served in [&mut first, &mut second] {
        served.start(0, IoRequest::Flush);
    }
    first.script.finish(0, Err(libc::EIO));
    drop(first);
    assert_eq!(second.finish(0, Ok(())), [(0, EIO)]);
}

#[test]
fn a_sync_that_a_broken_engine_did_not_start_delays_none() {
    let disk = disk(true);
    let [mut first, mut second] = [serve(&disk), serve(&disk)];
    first.script.break_down();
    // SAFETY: a flush has no buffers.
    unsafe { first.engine.submit(0, first.disk, IoRequest::Flush) };
    assert!(first.engine.kick().is_err());
    drop(first);
    second.start(0, IoRequest::Flush);
    assert_eq!(second.finish(0, Ok(())), [(0, None)]);
}
