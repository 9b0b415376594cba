//! A queue of requests to a raw image.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::executor::Executor;
use crate::operation::{Kind, Next, Operation, Traits};
use crate::queue::wait_and_reset;
use crate::threads::Threads;
use crate::uring::Uring;
use crate::{Completion, DiskQueue, Engine, Geometry, Request, SECTOR};

/// Requests in flight in one queue.
pub(crate) const DEPTH: u16 = 128;

/// Bounce buffers of one queue, of 256 KiB at most.
const BOUNCES: usize = 4;

#[derive(Debug)]
pub(crate) struct RawQueue {
    executor: Box<dyn Executor>,
    geometry: Geometry,
    traits: Traits,
    slots: Box<[Slot]>,
    /// Slots that wait for others, oldest first.
    waiting: VecDeque<u16>,
    /// Requests that ended without a call.
    ended: VecDeque<Completion>,
    /// A request ended since what waits was last looked at.
    ended_one: bool,
    bounces: usize,
    /// Requests not completed that rewrite parts of blocks they do not own.
    rewriting: usize,
    next_age: u64,
}

#[derive(Debug, Default)]
struct Slot {
    operation: Operation,
    /// Order of arrival, none if the slot is free.
    age: Option<u64>,
    /// The blocks of the disk it touches.
    blocks: (u64, u64),
    /// Whether it changes them, and whether it writes back parts of them that are not its own.
    changes: bool,
    rewrites: bool,
}

impl RawQueue {
    pub fn new(file: &Arc<File>, geometry: Geometry, engine: Engine) -> io::Result<Self> {
        let executor: Box<dyn Executor> = match engine {
            Engine::Threads => Box::new(Threads::new(file)?),
            Engine::Uring => Box::new(Uring::new(file, DEPTH)?),
            Engine::Auto => match Uring::new(file, DEPTH) {
                Ok(ring) => Box::new(ring),
                Err(error) => {
                    tracing::warn!(%error, "io_uring is not available, disks are served by threads");
                    Box::new(Threads::new(file)?)
                }
            },
        };
        Ok(Self::with_executor(executor, geometry))
    }

    fn with_executor(executor: Box<dyn Executor>, geometry: Geometry) -> Self {
        Self {
            executor,
            geometry,
            traits: Traits {
                align: geometry.align,
                punch: true,
                zero_range: true,
            },
            slots: (0..DEPTH).map(|_| Slot::default()).collect(),
            waiting: VecDeque::new(),
            ended: VecDeque::new(),
            ended_one: false,
            bounces: 0,
            rewriting: 0,
            next_age: 0,
        }
    }

    fn check(&self, request: &Request<'_>) -> io::Result<(Kind, u64, u64, bool)> {
        let (kind, offset, len, durable) = match *request {
            Request::Read { offset, buffers } => (Kind::Read, offset, total(buffers)?, false),
            Request::Write {
                offset,
                buffers,
                durable,
            } => (Kind::Write, offset, total(buffers)?, durable),
            Request::Flush => (Kind::Flush, 0, 0, false),
            Request::Discard { offset, len, durable } => (Kind::Discard, offset, len, durable),
            Request::WriteZeroes {
                offset,
                len,
                unmap,
                durable,
            } => (Kind::Zero { unmap }, offset, len, durable),
        };
        if self.geometry.read_only && !matches!(kind, Kind::Read | Kind::Flush) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let end = offset.checked_add(len).filter(|end| *end <= self.geometry.size);
        if end.is_none() || !(offset | len).is_multiple_of(SECTOR) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok((kind, offset, len, durable || !self.geometry.write_cache))
    }

    /// Whether `tag` must not start yet. A request that rewrites what is not its own is kept apart from
    /// every other change of the same blocks: reading them, then writing them back, would undo it.
    fn must_wait(&self, tag: u16) -> bool {
        let slot = &self.slots[usize::from(tag)];
        if self.rewriting == 0 || !slot.changes {
            return false;
        }
        let (start, end) = slot.blocks;
        self.slots.iter().any(|other| {
            other.age.is_some_and(|age| Some(age) < slot.age)
                && other.changes
                && (other.rewrites || slot.rewrites)
                && start < other.blocks.1
                && other.blocks.0 < end
        })
    }

    /// Takes a slot's request as far as it gets without waiting.
    fn advance(&mut self, tag: u16) {
        let operation = &mut self.slots[usize::from(tag)].operation;
        loop {
            match operation.next(&self.traits) {
                // SAFETY: the call's iovecs are in the slot, which stays where it is and is not touched
                // until the call is popped, like the memory they name by the contract of `submit`.
                Next::Call(call) => return unsafe { self.executor.push(tag, call) },
                Next::Bounce(_) if self.bounces == BOUNCES => return self.waiting.push_back(tag),
                Next::Bounce(bytes) => {
                    if operation.give_bounce(bytes, self.traits.align) {
                        self.bounces += 1;
                    }
                }
                Next::Done(result) => return self.end(tag, result),
            }
        }
    }

    fn end(&mut self, tag: u16, result: io::Result<()>) {
        let slot = &mut self.slots[usize::from(tag)];
        slot.age = None;
        self.rewriting -= usize::from(slot.rewrites);
        self.bounces -= usize::from(slot.operation.clear());
        self.ended.push_back(Completion { tag, result });
        self.ended_one = true;
    }

    /// Starts what waited for requests that have ended.
    fn unblock(&mut self) {
        while std::mem::take(&mut self.ended_one) {
            for _ in 0..self.waiting.len() {
                let Some(tag) = self.waiting.pop_front() else {
                    break;
                };
                if self.must_wait(tag) {
                    self.waiting.push_back(tag);
                } else {
                    self.advance(tag);
                }
            }
        }
    }
}

fn total(buffers: &[crate::Buffer]) -> io::Result<u64> {
    let add = |sum: u64, buffer: &crate::Buffer| sum.checked_add(buffer.len() as u64);
    buffers
        .iter()
        .try_fold(0, add)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

impl DiskQueue for RawQueue {
    fn depth(&self) -> u16 {
        DEPTH
    }

    unsafe fn submit(&mut self, tag: u16, request: Request<'_>) {
        assert!(
            self.slots[usize::from(tag)].age.is_none(),
            "tag {tag} is in flight"
        );
        let (kind, offset, len, durable) = match self.check(&request) {
            Ok(checked) => checked,
            Err(error) => {
                return self.ended.push_back(Completion {
                    tag,
                    result: Err(error),
                });
            }
        };
        let buffers = match request {
            Request::Read { buffers, .. } | Request::Write { buffers, .. } => buffers,
            _ => &[],
        };
        let slot = &mut self.slots[usize::from(tag)];
        slot.operation.begin(kind, offset, len, buffers, durable);
        slot.age = Some(self.next_age);
        slot.blocks = slot.operation.blocks(self.traits.align);
        slot.changes = slot.operation.changes();
        slot.rewrites = slot.operation.rewrites(self.traits.align);
        self.next_age += 1;
        self.rewriting += usize::from(slot.rewrites);
        if self.must_wait(tag) {
            self.waiting.push_back(tag);
        } else {
            self.advance(tag);
            self.unblock();
        }
    }

    fn kick(&mut self) -> io::Result<()> {
        self.executor.submit()
    }

    fn complete(&mut self) -> Option<Completion> {
        while self.ended.is_empty() {
            let (tag, result) = self.executor.pop()?;
            self.slots[usize::from(tag)]
                .operation
                .settle(result, &mut self.traits);
            self.advance(tag);
            self.unblock();
        }
        self.ended.pop_front()
    }

    fn event(&self) -> &EventFd {
        self.executor.event()
    }
}

impl Drop for RawQueue {
    fn drop(&mut self) {
        // The kernel must be done with memory that is not ours before its owner can think we are.
        while self.executor.running() > 0 {
            if self.executor.pop().is_none() {
                wait_and_reset(self.executor.event());
            }
        }
    }
}

#[cfg(test)]
mod tests;
