//! Counters of requests.

use super::kernel::{NONE, bench_of, buffers, drain, geometry};
use crate::{DiskCounters, ErrorPolicy, IoBuffer, IoRequest};

fn read(pieces: &[IoBuffer]) -> IoRequest<'_> {
    IoRequest::Read {
        offset: 0,
        buffers: &pieces[..1],
    }
}

#[test]
fn successful_requests_count_once_and_survive_their_engine() {
    let mut bench = bench_of(geometry(NONE), ErrorPolicy::Report, 1, true);
    let disk = bench.engine.disk(bench.disk).cloned().unwrap();
    let mut memory = vec![7; 8192];
    let pieces = buffers(&mut memory, 512);
    let requests = || {
        let write = IoRequest::Write {
            offset: 0,
            buffers: &pieces,
            durable: false,
        };
        let discard = IoRequest::Discard {
            offset: 0,
            len: 4096,
            durable: false,
        };
        [write, read(&pieces), IoRequest::Flush, discard]
    };
    let mut submit = |failure| {
        bench.kernel.lock().unwrap().failure = failure;
        for (tag, request) in (0..).zip(requests()) {
            // SAFETY: the memory outlives the completions below.
            unsafe { bench.engine.submit(tag, bench.disk, request) };
        }
        assert_eq!(drain(&mut bench.engine).len(), 4);
    };
    submit(None);
    let once = DiskCounters {
        reads: 1,
        read_bytes: 512,
        writes: 1,
        written_bytes: 8192,
        flushes: 1,
    };
    assert_eq!(disk.counters(), once);
    submit(Some(libc::EIO));
    assert_eq!(disk.counters(), once);
    bench.engine.detach(bench.disk).unwrap();
    assert_eq!(disk.counters(), once);
    let again = bench.engine.attach(&disk).unwrap();
    bench.kernel.lock().unwrap().failure = None;
    // SAFETY: the memory outlives the completion below.
    unsafe { bench.engine.submit(0, again, read(&pieces)) };
    drain(&mut bench.engine);
    let twice = DiskCounters {
        reads: 2,
        read_bytes: 1024,
        ..once
    };
    assert_eq!(disk.counters(), twice);
}
