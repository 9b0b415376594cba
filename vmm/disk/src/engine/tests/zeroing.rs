//! Zeroes on a file system without `fallocate`.

use std::mem::ManuallyDrop;

use super::kernel::{BLOCKS, NONE, buffers, drain, geometry};
use crate::testing::{BackendScript, CallKind};
use crate::{Disk, DiskId, Engine, ErrorPolicy, IoRequest};

const PIECE: u64 = 256 << 10;

/// A request that takes three pieces.
const ZEROES: IoRequest<'static> = IoRequest::WriteZeroes {
    offset: 0,
    len: 3 * PIECE,
    unmap: false,
    durable: false,
};

/// An engine with `count` disks, each of which zeroes its first piece, with the disk's number as tag. It is not
/// dropped, which waits for all calls.
fn zeroing(count: u16) -> (ManuallyDrop<Engine>, BackendScript, Vec<DiskId>) {
    let (engine, script) = BackendScript::engine(16);
    let mut engine = ManuallyDrop::new(engine);
    let mut disks = Vec::new();
    for tag in 0..count {
        let disk = Disk::without_image(geometry(NONE), ErrorPolicy::Report);
        disks.push(engine.attach(&disk).unwrap());
        submit(&mut engine, tag, disks[usize::from(tag)], ZEROES);
        finish(&mut engine, &script, tag, Err(libc::EOPNOTSUPP));
    }
    (engine, script, disks)
}

fn submit(engine: &mut Engine, tag: u16, disk: DiskId, request: IoRequest<'_>) {
    // SAFETY: the tests' buffers outlive their engines' use.
    unsafe { engine.submit(tag, disk, request) };
    engine.kick().unwrap();
}

/// Completes a call, and returns the results of the requests that ended.
fn finish(engine: &mut Engine, script: &BackendScript, tag: u16, result: Result<(), i32>) -> Vec<(u16, i32)> {
    script.finish(tag, result);
    ended(engine)
}

fn ended(engine: &mut Engine) -> Vec<(u16, i32)> {
    let errno =
        |result: std::io::Result<()>| result.map_or_else(|error| error.raw_os_error().unwrap(), |()| 0);
    let done = drain(engine);
    done.into_iter()
        .map(|done| (done.tag, errno(done.result)))
        .collect()
}

/// Tag and piece of the last call, which writes zeroes.
fn last(script: &BackendScript) -> (u16, u64) {
    let last = *script.made().last().unwrap();
    match last.what {
        CallKind::Write {
            offset, len: PIECE, ..
        } => (last.tag, offset / PIECE),
        other => panic!("{other:?}"),
    }
}

#[test]
fn other_requests_get_a_bounce_buffer_between_two_pieces() {
    let (mut engine, script, _) = zeroing(4);
    let disk = Disk::without_image(geometry(BLOCKS), ErrorPolicy::Report);
    let disk = engine.attach(&disk).unwrap();
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    let write = IoRequest::Write {
        offset: 512,
        buffers: &pieces,
        durable: false,
    };
    submit(&mut engine, 4, disk, write);
    assert_eq!(script.made().len(), 8, "it has no buffer");
    assert_eq!(finish(&mut engine, &script, 2, Ok(())), []);
    let read = *script.made().last().unwrap();
    assert_eq!((read.tag, matches!(read.what, CallKind::Read { .. })), (4, true));
    assert_eq!(finish(&mut engine, &script, 4, Ok(())), []);
    assert_eq!(finish(&mut engine, &script, 4, Ok(())), [(4, 0)]);
    assert_eq!(last(&script), (2, 1));
    // Nobody waits now.
    assert_eq!(finish(&mut engine, &script, 2, Ok(())), []);
    assert_eq!(last(&script), (2, 2));
    assert_eq!(finish(&mut engine, &script, 2, Ok(())), [(2, 0)]);
    for tag in [0, 1, 3] {
        for _ in 0..2 {
            assert_eq!(finish(&mut engine, &script, tag, Ok(())), []);
        }
        assert_eq!(finish(&mut engine, &script, tag, Ok(())), [(tag, 0)]);
    }
}

#[test]
fn zeroing_is_suspended_between_two_pieces() {
    let (mut engine, script, disks) = zeroing(5);
    assert_eq!(script.made().len(), 9, "the last one has no buffer");
    engine.suspend_zeroing();
    for tag in 0..4 {
        assert!(engine.is_busy());
        assert_eq!(finish(&mut engine, &script, tag, Ok(())), []);
    }
    assert_eq!(script.made().len(), 9);
    assert!(!engine.is_busy());
    assert!(disks.iter().all(|disk| engine.in_flight(*disk) == 1));
    // Other requests are served.
    submit(&mut engine, 9, disks[0], IoRequest::Flush);
    assert_eq!(finish(&mut engine, &script, 9, Ok(())), [(9, 0)]);
    engine.resume_zeroing();
    engine.kick().unwrap();
    for call in 10.. {
        let Some(made) = script.made().get(call).copied() else {
            break;
        };
        script.finish(made.tag, Ok(()));
        for (_, errno) in ended(&mut engine) {
            assert_eq!(errno, 0);
        }
    }
    let mut pieces: Vec<_> = script.made().iter().map(|made| (made.tag, made.what)).collect();
    pieces.retain(|(_, what)| matches!(what, CallKind::Write { .. }));
    assert_eq!(pieces.len(), 15, "none is written twice");
    assert!(!engine.is_busy() && disks.iter().all(|disk| engine.in_flight(*disk) == 0));
}

#[test]
fn abandoned_zeroing_ends_after_its_piece() {
    let (mut engine, script, disks) = zeroing(6);
    let made = script.made().len();
    // Four are under way, and two wait for a buffer.
    engine.abandon_zeroing(&[0, 4, 9, 100]);
    assert_eq!(ended(&mut engine), [(4, libc::ECANCELED)]);
    assert_eq!(finish(&mut engine, &script, 0, Ok(())), [(0, libc::ECANCELED)]);
    assert_eq!(last(&script), (5, 0), "it has the buffer");
    engine.suspend_zeroing();
    assert_eq!(finish(&mut engine, &script, 1, Ok(())), []);
    engine.abandon_zeroing(&[1]);
    assert_eq!(ended(&mut engine), [(1, libc::ECANCELED)]);
    assert_eq!(script.made().len(), made + 1);
    // The tag's next request is a new one.
    engine.resume_zeroing();
    submit(&mut engine, 1, disks[1], ZEROES);
    for _ in 0..2 {
        assert_eq!(finish(&mut engine, &script, 1, Ok(())), []);
    }
    assert_eq!(finish(&mut engine, &script, 1, Ok(())), [(1, 0)]);
}
