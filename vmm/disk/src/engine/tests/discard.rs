//! Discards of block devices.

use std::time::{Duration, Instant};

use super::kernel::{NONE, bench, buffers, drain, geometry, one};
use crate::io_backend::IoCall;
use crate::{Disk, IoCompletion, IoRequest};

const BLOCK: u64 = 4096;

fn discard(offset: u64, len: u64) -> IoRequest<'static> {
    let durable = false;
    IoRequest::Discard { offset, len, durable }
}

#[test]
fn a_discard_is_cut_to_whole_blocks() {
    for (offset, len, expected) in [
        (BLOCK, 2 * BLOCK, Some((BLOCK, 2 * BLOCK))),
        (512, 3 * BLOCK, Some((BLOCK, 2 * BLOCK))),
        (BLOCK - 512, 1024, None),
        (512, BLOCK, None),
        (512, 512, None),
    ] {
        let mut bench = bench(NONE, 1, true);
        bench.engine.attached(bench.disk).unwrap().traits.discard_block = BLOCK;
        one(&mut bench, discard(offset, len)).unwrap();
        let kernel = bench.kernel.lock().unwrap();
        let made = kernel.calls.last().map(|call| match call {
            IoCall::Allocate {
                offset, len, hint, ..
            } => {
                assert!(hint);
                (*offset, *len)
            }
            other => panic!("{other:?}"),
        });
        assert_eq!(made, expected, "{offset} {len}");
    }
}

#[test]
fn a_device_without_discards_is_still_zeroed_by_fallocate() {
    let mut bench = bench(NONE, 5, false);
    for _ in 0..3 {
        one(&mut bench, discard(0, BLOCK)).unwrap();
    }
    let traits = bench.engine.attached(bench.disk).unwrap().traits;
    assert!(!traits.discard && traits.punch && traits.zero_range);
}

#[test]
fn the_thread_of_a_device_discards() {
    let mut bench = bench(NONE, 1, true);
    // Not one that can discard: the kernel does not know the ioctl.
    let device = Disk::of_device(tempfile::tempfile().unwrap(), geometry(NONE));
    let id = bench.engine.attach(&device).unwrap();
    let mut submit = |tag, disk, request| {
        // SAFETY: the buffers outlive the completion.
        unsafe { bench.engine.submit(tag, disk, request) };
        bench.engine.kick().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match drain(&mut bench.engine).pop() {
                Some(IoCompletion { result, .. }) => return result.err().and_then(|e| e.raw_os_error()),
                None => bench.engine.wait(),
            }
            assert!(Instant::now() < deadline);
        }
    };
    assert_eq!(submit(0, id, discard(0, BLOCK)), Some(libc::ENOTTY));
    assert_eq!(bench.kernel.lock().unwrap().calls.len(), 0);
    let mut memory = vec![7; 512];
    let pieces = buffers(&mut memory, 512);
    let write = IoRequest::Write {
        offset: 0,
        buffers: &pieces,
        durable: false,
    };
    let zero = IoRequest::WriteZeroes {
        offset: 0,
        len: BLOCK,
        unmap: true,
        durable: false,
    };
    for (tag, disk, request) in [(1, id, write), (2, id, zero), (3, bench.disk, discard(0, BLOCK))] {
        assert_eq!(submit(tag, disk, request), None);
    }
    assert!(bench.kernel.lock().unwrap().calls.len() >= 3);
    bench.engine.detach(id).unwrap();
    assert_eq!(bench.engine.in_flight(id), 0);
}
