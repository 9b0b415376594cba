//! A fake kernel, and an engine that uses it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::geometry::Align;
use crate::io_backend::{IoBackend, IoCall, IovecList};
use crate::{Disk, DiskId, Engine, ErrorPolicy, Geometry, IoBuffer, IoCompletion, IoRequest, SECTOR};

pub const SECTORS: u64 = 4096;

#[derive(Debug)]
pub struct Kernel {
    /// By slot.
    pub images: Vec<Vec<u8>>,
    /// Alignment of every image.
    pub align: Align,
    pub random: u64,
    pub calls: Vec<IoCall>,
    pub fallocate: bool,
    /// Every call fails.
    pub failure: Option<i32>,
    /// Every sync fails.
    pub sync_failure: Option<i32>,
    /// One in so many calls fails with ENOSPC; syncs do not.
    pub shortage: Option<u64>,
    /// Writes move this many bytes, and then fail with ENOSPC.
    pub room: Option<u64>,
    /// The number of attached disks that the engine last gave.
    pub disks: usize,
}

#[derive(Clone, Debug)]
pub struct Fake {
    kernel: Arc<Mutex<Kernel>>,
    pushed: Vec<(u16, u32, IoCall)>,
    out: Vec<(u16, u32, IoCall)>,
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

    fn perform(&mut self, slot: u32, call: IoCall) -> i32 {
        self.calls.push(call);
        if let Some(errno) = self.failure {
            return -errno;
        }
        if let (IoCall::Sync, Some(errno)) = (call, self.sync_failure) {
            return -errno;
        }
        if self.random(8) == 0 {
            return -[libc::EINTR, libc::EAGAIN][self.random(2) as usize];
        }
        if let Some(one_in) = self.shortage
            && !matches!(call, IoCall::Sync)
            && self.random(one_in) == 0
        {
            return -libc::ENOSPC;
        }
        let slot = slot as usize;
        match call {
            IoCall::Read { offset, vector } => self.transfer(slot, offset, vector, false),
            IoCall::Write { offset, vector, .. } => self.transfer(slot, offset, vector, true),
            IoCall::Sync => 0,
            IoCall::Allocate { .. } if !self.fallocate => -libc::EOPNOTSUPP,
            IoCall::Allocate {
                mode, offset, len, ..
            } => {
                assert_ne!(mode & libc::FALLOC_FL_KEEP_SIZE, 0, "the image must not grow");
                self.images[slot][offset as usize..(offset + len) as usize].fill(0);
                0
            }
        }
    }

    fn transfer(&mut self, slot: usize, offset: u64, vector: IovecList, write: bool) -> i32 {
        assert!((1..=1024).contains(&vector.count));
        assert_eq!(offset % self.align.offset, 0, "{offset}");
        // SAFETY: the engine under test guarantees that the vector is valid.
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
        let moved = match &mut self.room {
            Some(0) if write => return -libc::ENOSPC,
            Some(room) if write => {
                let moved = moved.min(*room);
                *room -= moved;
                moved
            }
            _ => moved,
        };
        let mut at = offset as usize;
        let mut rest = moved as usize;
        for buffer in buffers {
            let len = rest.min(buffer.iov_len);
            // SAFETY: the engine under test guarantees that the buffers are valid.
            let memory = unsafe { std::slice::from_raw_parts_mut(buffer.iov_base.cast::<u8>(), len) };
            if write {
                self.images[slot][at..at + len].copy_from_slice(memory);
            } else {
                memory.copy_from_slice(&self.images[slot][at..at + len]);
            }
            at += len;
            rest -= len;
        }
        moved as i32
    }
}

impl IoBackend for Fake {
    fn max_files(&self) -> u32 {
        2
    }

    fn attach(&mut self, _: u32, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn detach(&mut self, slot: u32) -> io::Result<()> {
        assert!(self.out.iter().all(|(_, p, _)| *p != slot));
        Ok(())
    }

    fn set_disks(&mut self, disks: usize) {
        self.kernel.lock().unwrap().disks = disks;
    }

    unsafe fn push(&mut self, tag: u16, slot: u32, call: IoCall) {
        assert!(self.out.iter().chain(&self.pushed).all(|(t, ..)| *t != tag));
        self.pushed.push((tag, slot, call));
    }

    fn submit(&mut self) -> io::Result<bool> {
        let pushed = std::mem::take(&mut self.pushed);
        let any = !pushed.is_empty();
        self.out.extend(pushed);
        Ok(any)
    }

    fn pop(&mut self) -> Option<(u16, i32)> {
        let mut kernel = self.kernel.lock().unwrap();
        if self.out.is_empty() {
            return None;
        }
        let index = kernel.random(self.out.len() as u64) as usize;
        let (tag, slot, call) = self.out.swap_remove(index);
        Some((tag, kernel.perform(slot, call)))
    }

    fn running(&self) -> usize {
        self.out.len()
    }

    fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the event is open as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }
}

pub fn geometry(align: Align) -> Geometry {
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
        preallocated: false,
        write_cache: true,
        align,
        late_errors: false,
    }
}

/// An engine with a disk.
pub struct Bench {
    pub engine: Engine,
    pub disk: DiskId,
    /// A handle to it.
    pub image: Disk,
    pub kernel: Arc<Mutex<Kernel>>,
}

/// On which errors are reported.
pub fn bench(align: Align, seed: u64, fallocate: bool) -> Bench {
    bench_of(geometry(align), ErrorPolicy::Report, seed, fallocate)
}

pub fn bench_of(geometry: Geometry, policy: ErrorPolicy, seed: u64, fallocate: bool) -> Bench {
    let content: Vec<u8> = (0..SECTORS * SECTOR).map(|i| (i / SECTOR) as u8 ^ 0x5a).collect();
    let (calls, failure, sync_failure, shortage, room) = (Vec::new(), None, None, None, None);
    let kernel = Kernel {
        images: vec![content; 2],
        align: geometry.align,
        random: seed | 1,
        calls,
        fallocate,
        failure,
        sync_failure,
        shortage,
        room,
        disks: 0,
    };
    let kernel = Arc::new(Mutex::new(kernel));
    let fake = Fake {
        kernel: Arc::clone(&kernel),
        pushed: Vec::new(),
        out: Vec::new(),
        event: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
    };
    let mut engine = Engine::with_backend(Box::new(fake), 128);
    let image = Disk::without_image(geometry, policy);
    let disk = engine.attach(&image).unwrap();
    Bench {
        engine,
        disk,
        image,
        kernel,
    }
}

pub fn drain(engine: &mut Engine) -> Vec<IoCompletion> {
    let mut all = Vec::new();
    while let Some(completion) = engine.complete() {
        all.push(completion);
    }
    all
}

/// Cuts `memory` into buffers at multiples of `step`.
pub fn buffers(memory: &mut [u8], step: usize) -> Vec<IoBuffer> {
    memory
        .chunks_mut(step)
        .map(|chunk| IoBuffer::new(chunk.as_mut_ptr(), chunk.len()))
        .collect()
}

/// The result of one request.
pub fn one(bench: &mut Bench, request: IoRequest<'_>) -> io::Result<()> {
    // SAFETY: the callers' buffers outlive the call, which waits for the completion.
    unsafe { bench.engine.submit(7, bench.disk, request) };
    let mut done = drain(&mut bench.engine);
    assert_eq!((done.len(), done[0].tag), (1, 7));
    done.remove(0).result
}

pub const NONE: Align = Align::NONE;
pub const BLOCKS: Align = Align {
    memory: 4096,
    offset: 4096,
};
