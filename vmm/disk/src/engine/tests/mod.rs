//! The engine and its operations against a made-up kernel: calls finish in any order, move less than they
//! were asked to, are interrupted, and `fallocate` may not exist. What the disk holds at the end is compared
//! with a model.

use std::io;

use proptest::prelude::*;

use super::*;
use crate::geometry::Align;
use crate::io_backend::IoCall;
use crate::{Geometry, IoBuffer, IoRequest, SECTOR};

mod counted;
mod discard;
mod held;
mod kernel;
mod many;
mod syncs;
mod zeroing;

use kernel::{BLOCKS, Bench, NONE, SECTORS, bench, bench_of, buffers, drain, one};

#[derive(Clone, Copy, Debug)]
struct Op {
    kind: u8,
    /// Of two.
    disk: usize,
    sector: u64,
    sectors: u64,
    step: usize,
    shift: usize,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = (
        0..5u8,
        0..2usize,
        0..SECTORS,
        1..40u64,
        prop::sample::select(vec![1usize, 100, 512, 4096, 1 << 20]),
        0..3usize,
    )
        .prop_map(|(kind, disk, sector, sectors, step, shift)| Op {
            kind,
            disk,
            sector,
            // Sometimes more than one bounce buffer holds.
            sectors: if sectors == 39 { 1200 } else { sectors }.min(SECTORS - sector),
            step,
            shift,
        });
    prop::collection::vec(op, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Requests in flight together that share no sector never disturb each other, even where they share a
    /// block; all of them complete; and requests that fail and are retried have the same result.
    #[test]
    fn reads_return_the_data_of_earlier_writes(
        batches in prop::collection::vec(ops(), 1..5),
        seed: u64,
        align in prop::sample::select(vec![(1, 1), (512, 512), (4, 512), (4096, 4096)]),
        fallocate: bool,
        shortage in prop::option::of(3u64..20),
    ) {
        let align = Align { memory: align.0, offset: align.1 };
        let geometry = kernel::geometry(align);
        let Bench { mut engine, disk, kernel, .. } = bench_of(geometry, ErrorPolicy::Stop, seed, fallocate);
        kernel.lock().unwrap().shortage = shortage;
        let disks = [disk, engine.attach(&Disk::without_image(geometry, ErrorPolicy::NoSpace)).unwrap()];
        let mut models = kernel.lock().unwrap().images.clone();
        for batch in batches {
            let mut taken: Vec<(usize, u64, u64)> = Vec::new();
            let mut memory: Vec<(Op, Vec<u8>)> = Vec::new();
            for op in batch {
                let (from, to) = (op.sector, op.sector + op.sectors);
                if taken.iter().any(|(disk, start, end)| *disk == op.disk && from < *end && *start < to) {
                    continue;
                }
                taken.push((op.disk, from, to));
                let fill = if op.kind == 1 { taken.len() as u8 } else { 0xee };
                memory.push((op, vec![fill; (op.sectors * SECTOR) as usize + op.shift]));
            }
            let before = models.clone();
            for (tag, (op, memory)) in memory.iter_mut().enumerate() {
                let (offset, len) = (op.sector * SECTOR, op.sectors * SECTOR);
                let range = offset as usize..(offset + len) as usize;
                let pieces = buffers(&mut memory[op.shift..], op.step);
                let model = &mut models[op.disk];
                let request = match op.kind {
                    0 => IoRequest::Read { offset, buffers: &pieces },
                    1 => {
                        model[range].fill((tag + 1) as u8);
                        IoRequest::Write { offset, buffers: &pieces, durable: false }
                    }
                    2 => {
                        if fallocate {
                            model[range].fill(0);
                        }
                        IoRequest::Discard { offset, len, durable: true }
                    }
                    3 => {
                        model[range].fill(0);
                        IoRequest::WriteZeroes { offset, len, unmap: op.shift == 1, durable: false }
                    }
                    _ => IoRequest::Flush,
                };
                // SAFETY: `memory` lives, unmoved, until the completions below.
                unsafe { engine.submit(tag as u16, disks[op.disk], request) };
            }
            engine.kick().unwrap();
            let mut done = drain(&mut engine);
            let mut rounds = 0;
            while done.len() < memory.len() {
                prop_assert!(!engine.is_busy());
                let stopped: Vec<_> = std::iter::from_fn(|| engine.take_stopped()).collect();
                prop_assert!((1..=2).contains(&stopped.len()), "{:?}", stopped);
                for stopped in stopped {
                    prop_assert_eq!(stopped.error.raw_os_error(), Some(libc::ENOSPC));
                    engine.retry_held(stopped.disk);
                }
                done.extend(drain(&mut engine));
                rounds += 1;
                prop_assert!(rounds < 10_000, "requests hang");
            }
            prop_assert_eq!(done.len(), memory.len(), "every request ends once");
            prop_assert!(done.iter().all(|c| c.result.is_ok()), "{:?}", done);
            for (op, memory) in &memory {
                if op.kind == 0 {
                    let range = (op.sector * SECTOR) as usize..((op.sector + op.sectors) * SECTOR) as usize;
                    prop_assert!(memory[op.shift..] == before[op.disk][range]);
                }
            }
            prop_assert!(kernel.lock().unwrap().images == models);
        }
        prop_assert_eq!((engine.bounces, engine.rewriting, engine.waiting.len()), (0, 0, 0));
        prop_assert_eq!(disks.map(|disk| engine.in_flight(disk)), [0, 0]);
    }
}

#[test]
fn durable_changes_are_on_disk_before_they_complete() {
    let mut memory = vec![1; 4096];
    let pieces = buffers(&mut memory, 512);
    let write = IoRequest::Write {
        offset: 0,
        buffers: &pieces,
        durable: true,
    };
    let zero = IoRequest::WriteZeroes {
        offset: 0,
        len: 4096,
        unmap: false,
        durable: true,
    };
    // Without direct I/O, and if zeroes are written, a sync follows.
    for (align, fallocate, request, syncs) in [
        (NONE, true, write, true),
        (NONE, true, zero, true),
        (NONE, false, zero, true),
        (BLOCKS, true, write, false),
        (BLOCKS, true, zero, true),
        (BLOCKS, false, zero, false),
    ] {
        let mut bench = bench(align, 1, fallocate);
        one(&mut bench, request).unwrap();
        let kernel = bench.kernel.lock().unwrap();
        let (last, earlier) = kernel.calls.split_last().unwrap();
        let durable =
            |call: &IoCall| matches!(call, IoCall::Write { durable, .. } if *durable == (align != NONE));
        let writes = |call: &&IoCall| matches!(call, IoCall::Write { .. });
        assert!(
            kernel.calls.iter().filter(writes).all(durable),
            "{:?}",
            kernel.calls
        );
        assert_eq!(matches!(last, IoCall::Sync), syncs, "{:?}", kernel.calls);
        assert!(syncs || durable(last), "{earlier:?} {last:?}");
    }
}

#[test]
fn a_write_through_disk_makes_every_write_durable() {
    let write_cache = false;
    let geometry = Geometry {
        write_cache,
        ..kernel::geometry(BLOCKS)
    };
    let mut bench = bench_of(geometry, ErrorPolicy::Report, 1, false);
    let mut memory = vec![1; 512];
    let pieces = buffers(&mut memory, 512);
    one(
        &mut bench,
        IoRequest::Write {
            offset: 512,
            buffers: &pieces,
            durable: false,
        },
    )
    .unwrap();
    one(
        &mut bench,
        IoRequest::WriteZeroes {
            offset: 0,
            len: 512,
            unmap: false,
            durable: false,
        },
    )
    .unwrap();
    let kernel = bench.kernel.lock().unwrap();
    assert!(kernel.calls.iter().any(|c| matches!(c, IoCall::Write { .. })));
    assert!(
        kernel
            .calls
            .iter()
            .all(|c| !matches!(c, IoCall::Write { durable: false, .. })),
        "{:?}",
        kernel.calls
    );
}

#[test]
fn errors_and_endless_interruptions_end_a_request() {
    for (errno, expected) in [
        (libc::EIO, libc::EIO),
        (libc::ENOSPC, libc::ENOSPC),
        (libc::EAGAIN, libc::EAGAIN),
    ] {
        for align in [NONE, BLOCKS] {
            let mut bench = bench(align, 3, true);
            bench.kernel.lock().unwrap().failure = Some(errno);
            let mut memory = vec![1; 1024];
            let pieces = buffers(&mut memory, 512);
            for request in [
                IoRequest::Read {
                    offset: 512,
                    buffers: &pieces,
                },
                IoRequest::Write {
                    offset: 512,
                    buffers: &pieces,
                    durable: false,
                },
                IoRequest::WriteZeroes {
                    offset: 0,
                    len: 512,
                    unmap: true,
                    durable: false,
                },
                IoRequest::Flush,
            ] {
                let error = one(&mut bench, request).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(expected));
            }
            assert_eq!((bench.engine.bounces, bench.engine.rewriting), (0, 0));
        }
    }
}

#[test]
fn a_refused_fallocate_is_not_tried_again() {
    let mut bench = bench(NONE, 5, false);
    for _ in 0..3 {
        one(
            &mut bench,
            IoRequest::WriteZeroes {
                offset: 0,
                len: 4096,
                unmap: true,
                durable: false,
            },
        )
        .unwrap();
        one(
            &mut bench,
            IoRequest::Discard {
                offset: 0,
                len: 4096,
                durable: false,
            },
        )
        .unwrap();
    }
    let traits = bench.engine.attached(bench.disk).unwrap().traits;
    assert!(!traits.punch && !traits.zero_range);
    assert_eq!(bench.kernel.lock().unwrap().images[0][..4096], [0; 4096]);
}

#[test]
fn requests_beyond_the_disk_are_refused() {
    let mut bench = bench(NONE, 1, true);
    let end = SECTORS * SECTOR;
    let mut memory = vec![1; 1024];
    let whole = buffers(&mut memory, 512);
    let huge = [
        IoBuffer::new(std::ptr::null_mut(), usize::MAX),
        IoBuffer::new(std::ptr::null_mut(), 1),
    ];
    for request in [
        IoRequest::Read {
            offset: end,
            buffers: &whole,
        },
        IoRequest::Read {
            offset: end - 512,
            buffers: &whole,
        },
        IoRequest::Read {
            offset: u64::MAX - 511,
            buffers: &whole,
        },
        IoRequest::Read {
            offset: 1,
            buffers: &whole,
        },
        IoRequest::Read {
            offset: 0,
            buffers: &huge,
        },
        IoRequest::Write {
            offset: end - 512,
            buffers: &whole,
            durable: false,
        },
        IoRequest::Discard {
            offset: 0,
            len: 100,
            durable: false,
        },
        IoRequest::Discard {
            offset: 512,
            len: end,
            durable: false,
        },
        IoRequest::WriteZeroes {
            offset: 512,
            len: u64::MAX - 511,
            unmap: true,
            durable: false,
        },
    ] {
        assert_eq!(
            one(&mut bench, request).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }
    assert_eq!(bench.kernel.lock().unwrap().calls.len(), 0);
    one(
        &mut bench,
        IoRequest::Read {
            offset: end - 1024,
            buffers: &whole,
        },
    )
    .unwrap();
    one(
        &mut bench,
        IoRequest::Read {
            offset: 0,
            buffers: &[],
        },
    )
    .unwrap();
}

#[test]
fn a_read_only_disk_is_not_changed() {
    let read_only = true;
    let geometry = Geometry {
        read_only,
        ..kernel::geometry(NONE)
    };
    let mut bench = bench_of(geometry, ErrorPolicy::Report, 1, true);
    let mut memory = vec![1; 1024];
    let whole = buffers(&mut memory, 512);
    for request in [
        IoRequest::Write {
            offset: 0,
            buffers: &whole,
            durable: false,
        },
        IoRequest::Discard {
            offset: 0,
            len: 512,
            durable: false,
        },
        IoRequest::WriteZeroes {
            offset: 0,
            len: 512,
            unmap: true,
            durable: false,
        },
    ] {
        assert_eq!(
            one(&mut bench, request).unwrap_err().kind(),
            io::ErrorKind::PermissionDenied
        );
    }
    assert_eq!(bench.kernel.lock().unwrap().calls.len(), 0);
    one(&mut bench, IoRequest::Flush).unwrap();
}

#[test]
#[should_panic(expected = "in flight")]
fn a_tag_has_one_request_at_a_time() {
    let mut bench = bench(NONE, 1, true);
    for _ in 0..2 {
        // SAFETY: a flush has no buffers.
        unsafe { bench.engine.submit(0, bench.disk, IoRequest::Flush) };
    }
}

#[test]
fn a_flush_syncs() {
    let mut bench = bench(NONE, 1, true);
    one(&mut bench, IoRequest::Flush).unwrap();
    assert!(matches!(
        bench.kernel.lock().unwrap().calls.last(),
        Some(IoCall::Sync)
    ));
}
