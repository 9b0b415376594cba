//! The engine and its operations against a made-up kernel: calls finish in any order, move less than they
//! were asked to, are interrupted, and `fallocate` may not exist. What the disk holds at the end is compared
//! with a model.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::executor::{Call, Vector};
use crate::geometry::Align;
use crate::{Buffer, Geometry, Request, SECTOR};

const SECTORS: u64 = 4096;

#[derive(Debug)]
struct Kernel {
    image: Vec<u8>,
    align: Align,
    /// Of the one disk.
    place: u32,
    random: u64,
    calls: Vec<Call>,
    fallocate: bool,
    failure: Option<i32>,
}

#[derive(Clone, Debug)]
struct Fake {
    kernel: Arc<Mutex<Kernel>>,
    out: Vec<(u16, Call)>,
    event: Arc<EventFd>,
}

impl Kernel {
    /// xorshift64
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn perform(&mut self, call: Call) -> i32 {
        self.calls.push(call);
        if let Some(errno) = self.failure {
            return -errno;
        }
        if self.random(8) == 0 {
            return -[libc::EINTR, libc::EAGAIN][self.random(2) as usize];
        }
        match call {
            Call::Read { offset, vector } => self.transfer(offset, vector, false),
            Call::Write { offset, vector, .. } => self.transfer(offset, vector, true),
            Call::Sync => 0,
            Call::Allocate { .. } if !self.fallocate => -libc::EOPNOTSUPP,
            Call::Allocate { mode, offset, len } => {
                assert_ne!(mode & libc::FALLOC_FL_KEEP_SIZE, 0, "the image must not grow");
                self.image[offset as usize..(offset + len) as usize].fill(0);
                0
            }
        }
    }

    fn transfer(&mut self, offset: u64, vector: Vector, write: bool) -> i32 {
        assert!((1..=1024).contains(&vector.count));
        assert_eq!(offset % self.align.offset, 0, "{offset}");
        // SAFETY: the queue under test vouches for the vector.
        let buffers = unsafe { std::slice::from_raw_parts(vector.start, vector.count as usize) };
        for buffer in buffers {
            assert_eq!(buffer.iov_base as usize % self.align.memory, 0);
            assert_eq!(buffer.iov_len as u64 % self.align.offset, 0);
        }
        let asked: u64 = buffers.iter().map(|b| b.iov_len as u64).sum();
        // At least one unit.
        let units = asked / self.align.offset;
        let moved = if self.random(2) == 0 {
            units
        } else {
            1 + self.random(units)
        } * self.align.offset;
        let mut at = offset as usize;
        let mut rest = moved as usize;
        for buffer in buffers {
            let len = rest.min(buffer.iov_len);
            // SAFETY: the queue under test vouches for the buffers.
            let memory = unsafe { std::slice::from_raw_parts_mut(buffer.iov_base.cast::<u8>(), len) };
            if write {
                self.image[at..at + len].copy_from_slice(memory);
            } else {
                memory.copy_from_slice(&self.image[at..at + len]);
            }
            at += len;
            rest -= len;
        }
        moved as i32
    }
}

impl Executor for Fake {
    fn places(&self) -> u32 {
        2
    }

    fn attach(&mut self, place: u32, _: BorrowedFd<'_>) -> io::Result<()> {
        self.kernel.lock().unwrap().place = place;
        Ok(())
    }

    fn detach(&mut self, _: u32) -> io::Result<()> {
        Ok(())
    }

    unsafe fn push(&mut self, tag: u16, place: u32, call: Call) {
        assert_eq!(place, self.kernel.lock().unwrap().place);
        assert!(self.out.iter().all(|(t, _)| *t != tag));
        self.out.push((tag, call));
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn pop(&mut self) -> Option<(u16, i32)> {
        let mut kernel = self.kernel.lock().unwrap();
        if self.out.is_empty() {
            return None;
        }
        let index = kernel.random(self.out.len() as u64) as usize;
        let (tag, call) = self.out.swap_remove(index);
        Some((tag, kernel.perform(call)))
    }

    fn running(&self) -> usize {
        self.out.len()
    }

    fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the event is open as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }
}

fn geometry(align: Align) -> Geometry {
    Geometry {
        size: SECTORS * SECTOR,
        logical_block: 512,
        physical_block: 4096,
        alignment_offset: 0,
        minimum_io: 4096,
        optimal_io: 0,
        discard_granularity: 4096,
        max_discard: 1 << 30,
        read_only: false,
        write_cache: true,
        align,
    }
}

/// An engine with one disk, on which errors are reported.
struct Bench {
    engine: Engine,
    disk: DiskId,
    kernel: Arc<Mutex<Kernel>>,
}

fn bench(align: Align, seed: u64, fallocate: bool) -> Bench {
    bench_of(geometry(align), seed, fallocate)
}

fn bench_of(geometry: Geometry, seed: u64, fallocate: bool) -> Bench {
    let image = (0..SECTORS * SECTOR).map(|i| (i / SECTOR) as u8 ^ 0x5a).collect();
    let (calls, failure, place) = (Vec::new(), None, 0);
    let kernel = Kernel {
        image,
        align: geometry.align,
        place,
        random: seed | 1,
        calls,
        fallocate,
        failure,
    };
    let kernel = Arc::new(Mutex::new(kernel));
    let fake = Fake {
        kernel: Arc::clone(&kernel),
        out: Vec::new(),
        event: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
    };
    let mut engine = Engine::with_executor(Box::new(fake), 128);
    let disk = engine
        .attach(&Disk::made_up(geometry, ErrorPolicy::Report))
        .unwrap();
    Bench { engine, disk, kernel }
}

fn drain(engine: &mut Engine) -> Vec<Completion> {
    let mut all = Vec::new();
    while let Some(completion) = engine.complete() {
        all.push(completion);
    }
    all
}

/// Cuts `memory` into buffers at multiples of `step`.
fn buffers(memory: &mut [u8], step: usize) -> Vec<Buffer> {
    memory
        .chunks_mut(step)
        .map(|chunk| Buffer::new(chunk.as_mut_ptr(), chunk.len()))
        .collect()
}

#[derive(Clone, Copy, Debug)]
struct Op {
    kind: u8,
    sector: u64,
    sectors: u64,
    step: usize,
    shift: usize,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = (
        0..5u8,
        0..SECTORS,
        1..40u64,
        prop::sample::select(vec![1usize, 100, 512, 4096, 1 << 20]),
        0..3usize,
    )
        .prop_map(|(kind, sector, sectors, step, shift)| Op {
            kind,
            sector,
            // Now and then more than one bounce buffer holds.
            sectors: if sectors == 39 { 1200 } else { sectors }.min(SECTORS - sector),
            step,
            shift,
        });
    prop::collection::vec(op, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Requests in flight together that share no sector never disturb each other, even where they share a
    /// block; and all of them come to an end.
    #[test]
    fn the_disk_holds_what_was_written(
        batches in prop::collection::vec(ops(), 1..5),
        seed: u64,
        align in prop::sample::select(vec![(1, 1), (512, 512), (4, 512), (4096, 4096)]),
        fallocate: bool,
    ) {
        let align = Align { memory: align.0, offset: align.1 };
        let Bench { mut engine, disk, kernel } = bench(align, seed, fallocate);
        let mut model = kernel.lock().unwrap().image.clone();
        for batch in batches {
            let mut taken: Vec<(u64, u64)> = Vec::new();
            let mut memory: Vec<(Op, Vec<u8>)> = Vec::new();
            for op in batch {
                let (from, to) = (op.sector, op.sector + op.sectors);
                if taken.iter().any(|(start, end)| from < *end && *start < to) {
                    continue;
                }
                taken.push((from, to));
                let fill = if op.kind == 1 { taken.len() as u8 } else { 0xee };
                memory.push((op, vec![fill; (op.sectors * SECTOR) as usize + op.shift]));
            }
            let before = model.clone();
            for (tag, (op, memory)) in memory.iter_mut().enumerate() {
                let (offset, len) = (op.sector * SECTOR, op.sectors * SECTOR);
                let range = offset as usize..(offset + len) as usize;
                let pieces = buffers(&mut memory[op.shift..], op.step);
                let request = match op.kind {
                    0 => Request::Read { offset, buffers: &pieces },
                    1 => {
                        model[range].fill((tag + 1) as u8);
                        Request::Write { offset, buffers: &pieces, durable: false }
                    }
                    2 => {
                        if fallocate {
                            model[range].fill(0);
                        }
                        Request::Discard { offset, len, durable: true }
                    }
                    3 => {
                        model[range].fill(0);
                        Request::WriteZeroes { offset, len, unmap: op.shift == 1, durable: false }
                    }
                    _ => Request::Flush,
                };
                // SAFETY: `memory` lives, unmoved, until the completions below.
                unsafe { engine.submit(tag as u16, disk, request) };
            }
            engine.kick().unwrap();
            let done = drain(&mut engine);
            prop_assert_eq!(done.len(), memory.len(), "every request ends");
            prop_assert!(done.iter().all(|c| c.result.is_ok()), "{:?}", done);
            for (op, memory) in &memory {
                if op.kind == 0 {
                    let range = (op.sector * SECTOR) as usize..((op.sector + op.sectors) * SECTOR) as usize;
                    prop_assert!(memory[op.shift..] == before[range]);
                }
            }
            prop_assert!(kernel.lock().unwrap().image == model);
        }
        prop_assert_eq!((engine.bounces, engine.rewriting, engine.waiting.len()), (0, 0, 0));
    }
}

const NONE: Align = Align::NONE;
const BLOCKS: Align = Align {
    memory: 4096,
    offset: 4096,
};

fn one(bench: &mut Bench, request: Request<'_>) -> io::Result<()> {
    // SAFETY: the callers' buffers outlive the call, which waits for the completion.
    unsafe { bench.engine.submit(7, bench.disk, request) };
    let mut done = drain(&mut bench.engine);
    assert_eq!((done.len(), done[0].tag), (1, 7));
    done.remove(0).result
}

#[test]
fn durable_changes_are_on_disk_before_they_complete() {
    let mut bench = bench(NONE, 1, true);
    let mut memory = vec![1; 512];
    let pieces = buffers(&mut memory, 512);
    one(
        &mut bench,
        Request::Write {
            offset: 0,
            buffers: &pieces,
            durable: true,
        },
    )
    .unwrap();
    one(
        &mut bench,
        Request::WriteZeroes {
            offset: 0,
            len: 512,
            unmap: false,
            durable: true,
        },
    )
    .unwrap();
    let kernel = bench.kernel.lock().unwrap();
    assert!(
        kernel
            .calls
            .iter()
            .all(|c| !matches!(c, Call::Write { durable: false, .. }))
    );
    assert!(matches!(kernel.calls.last(), Some(Call::Sync)));
}

#[test]
fn a_write_through_disk_makes_every_write_durable() {
    let write_cache = false;
    let geometry = Geometry {
        write_cache,
        ..geometry(BLOCKS)
    };
    let mut bench = bench_of(geometry, 1, false);
    let mut memory = vec![1; 512];
    let pieces = buffers(&mut memory, 512);
    one(
        &mut bench,
        Request::Write {
            offset: 512,
            buffers: &pieces,
            durable: false,
        },
    )
    .unwrap();
    one(
        &mut bench,
        Request::WriteZeroes {
            offset: 0,
            len: 512,
            unmap: false,
            durable: false,
        },
    )
    .unwrap();
    let kernel = bench.kernel.lock().unwrap();
    assert!(kernel.calls.iter().any(|c| matches!(c, Call::Write { .. })));
    assert!(
        kernel
            .calls
            .iter()
            .all(|c| !matches!(c, Call::Write { durable: false, .. })),
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
                Request::Read {
                    offset: 512,
                    buffers: &pieces,
                },
                Request::Write {
                    offset: 512,
                    buffers: &pieces,
                    durable: false,
                },
                Request::WriteZeroes {
                    offset: 0,
                    len: 512,
                    unmap: true,
                    durable: false,
                },
                Request::Flush,
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
            Request::WriteZeroes {
                offset: 0,
                len: 4096,
                unmap: true,
                durable: false,
            },
        )
        .unwrap();
        one(
            &mut bench,
            Request::Discard {
                offset: 0,
                len: 4096,
                durable: false,
            },
        )
        .unwrap();
    }
    let traits = bench.engine.attached(bench.disk).unwrap().traits;
    assert!(!traits.punch && !traits.zero_range);
    assert_eq!(bench.kernel.lock().unwrap().image[..4096], [0; 4096]);
}

#[test]
fn what_does_not_fit_the_disk_is_refused() {
    let mut bench = bench(NONE, 1, true);
    let end = SECTORS * SECTOR;
    let mut memory = vec![1; 1024];
    let whole = buffers(&mut memory, 512);
    let huge = [
        Buffer::new(std::ptr::null_mut(), usize::MAX),
        Buffer::new(std::ptr::null_mut(), 1),
    ];
    for request in [
        Request::Read {
            offset: end,
            buffers: &whole,
        },
        Request::Read {
            offset: end - 512,
            buffers: &whole,
        },
        Request::Read {
            offset: u64::MAX - 511,
            buffers: &whole,
        },
        Request::Read {
            offset: 1,
            buffers: &whole,
        },
        Request::Read {
            offset: 0,
            buffers: &huge,
        },
        Request::Write {
            offset: end - 512,
            buffers: &whole,
            durable: false,
        },
        Request::Discard {
            offset: 0,
            len: 100,
            durable: false,
        },
        Request::Discard {
            offset: 512,
            len: end,
            durable: false,
        },
        Request::WriteZeroes {
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
        Request::Read {
            offset: end - 1024,
            buffers: &whole,
        },
    )
    .unwrap();
    one(
        &mut bench,
        Request::Read {
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
        ..geometry(NONE)
    };
    let mut bench = bench_of(geometry, 1, true);
    let mut memory = vec![1; 1024];
    let whole = buffers(&mut memory, 512);
    for request in [
        Request::Write {
            offset: 0,
            buffers: &whole,
            durable: false,
        },
        Request::Discard {
            offset: 0,
            len: 512,
            durable: false,
        },
        Request::WriteZeroes {
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
    one(&mut bench, Request::Flush).unwrap();
}

#[test]
#[should_panic(expected = "in flight")]
fn a_tag_has_one_request_at_a_time() {
    let mut bench = bench(NONE, 1, true);
    for _ in 0..2 {
        // SAFETY: a flush has no buffers.
        unsafe { bench.engine.submit(0, bench.disk, Request::Flush) };
    }
}

#[test]
fn a_flush_syncs() {
    let mut bench = bench(NONE, 1, true);
    one(&mut bench, Request::Flush).unwrap();
    assert!(matches!(
        bench.kernel.lock().unwrap().calls.last(),
        Some(Call::Sync)
    ));
}
