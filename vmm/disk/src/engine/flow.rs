//! A request's way through the engine: checked, kept apart from others, carried out call by call, held, completed.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{Attached, DiskId, Engine, Slot, Stopped};
use crate::geometry::Align;
use crate::operation::{Kind, Next};
use crate::{Buffer, Completion, ErrorPolicy, Request};

/// Bounce buffers of one engine, of 256 KiB at most.
const BOUNCES: usize = 4;

/// The place of a disk that is not attached.
const NOWHERE: u32 = u32::MAX;

/// A request that fits its disk.
struct Checked {
    kind: Kind,
    offset: u64,
    len: u64,
    durable: bool,
}

impl Attached {
    fn check(&self, request: &Request<'_>) -> io::Result<Checked> {
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
        let geometry = self.image.disk().geometry();
        if geometry.read_only && !matches!(kind, Kind::Read | Kind::Flush) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let end = offset.checked_add(len).filter(|end| *end <= geometry.size);
        if end.is_none() || !(offset | len).is_multiple_of(geometry.logical_block.into()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Checked {
            kind,
            offset,
            len,
            durable: durable || !geometry.write_cache,
        })
    }

    /// Notes what the failure of an operation that was to make earlier writes stable means for later ones: the page
    /// cache may have dropped them, and a second fdatasync would succeed without them.
    fn note_loss(&self, errno: i32) {
        let geometry = self.image.disk().geometry();
        if geometry.write_cache && geometry.align == Align::NONE {
            self.image.disk().lose(errno);
        }
    }
}

fn total(buffers: &[Buffer]) -> io::Result<u64> {
    let add = |sum: u64, buffer: &Buffer| sum.checked_add(buffer.len() as u64);
    buffers
        .iter()
        .try_fold(0, add)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

impl Engine {
    /// Takes a request. It may stay with us until [`Engine::kick`]. One that does not fit the disk (beyond its end,
    /// read-only, not whole logical blocks) completes with `InvalidInput` or `PermissionDenied`, one to a disk that
    /// is not attached with `NotFound`.
    ///
    /// # Safety
    /// `tag` is below [`Engine::depth`] and not in flight (checked; panics). Until the request's completion was
    /// returned or the engine was dropped, every buffer is valid memory, for reads or writes as the request needs.
    /// Others may access it meanwhile.
    pub unsafe fn submit(&mut self, tag: u16, disk: DiskId, request: Request<'_>) {
        assert!(tag < self.depth, "tag {tag} is beyond the engine's depth");
        let index = usize::from(tag);
        if self.slots.len() <= index {
            // What the kernel knows of the slots that move is not in them: lists of buffers and bounce buffers stay.
            let len = (index + 1).next_power_of_two().min(self.depth.into());
            self.slots.resize_with(len, Slot::default);
        }
        assert!(self.slots[index].age.is_none(), "tag {tag} is in flight");
        let attached = match self.attached(disk) {
            Ok(attached) => attached,
            Err(error) => return self.refuse(tag, NOWHERE, error),
        };
        attached.in_flight += 1;
        let checked = attached.check(&request);
        let align = attached.traits.align;
        let Checked {
            kind,
            offset,
            len,
            durable,
        } = match checked {
            Ok(checked) => checked,
            Err(error) => return self.refuse(tag, disk.place, error),
        };
        let buffers = match request {
            Request::Read { buffers, .. } | Request::Write { buffers, .. } => buffers,
            _ => &[],
        };
        let slot = &mut self.slots[index];
        slot.operation.begin(kind, offset, len, buffers, durable);
        slot.place = disk.place;
        slot.age = Some(self.next_age);
        slot.blocks = slot.operation.blocks(align);
        slot.changes = slot.operation.changes();
        slot.rewrites = slot.operation.rewrites(align);
        self.next_age += 1;
        self.rewriting += usize::from(slot.rewrites);
        if self.must_wait(tag) {
            self.waiting.push_back(tag);
        } else {
            self.advance(tag);
            self.unblock();
        }
    }

    /// Sends what was submitted on its way, all of it at once. Costs nothing if there is nothing.
    ///
    /// # Errors
    /// The engine is broken, perhaps since an earlier [`Engine::complete`]: nothing more will complete but what the
    /// kernel already has.
    pub fn kick(&mut self) -> io::Result<()> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        self.executor.submit().map(|_| ())
    }

    /// The next completed request, if there is one. Never waits. Before it says that there is none it sends what is
    /// left to send, such as the rest of a request of which the kernel did a part.
    pub fn complete(&mut self) -> Option<Completion> {
        while self.ended.is_empty() {
            let Some((tag, result)) = self.executor.pop() else {
                match self.executor.submit() {
                    Ok(true) => continue,
                    Ok(false) => return None,
                    Err(error) => {
                        self.broken = Some(error);
                        return None;
                    }
                }
            };
            let slot = &mut self.slots[usize::from(tag)];
            if let Some(attached) = &mut self.disks[slot.place as usize].attached {
                slot.operation.settle(result, &mut attached.traits);
            }
            self.advance(tag);
            self.unblock();
        }
        let (place, completion) = self.ended.pop_front()?;
        let place = self.disks.get_mut(place as usize);
        if let Some(attached) = place.and_then(|place| place.attached.as_mut()) {
            attached.in_flight -= 1;
        }
        Some(completion)
    }

    /// Readable when [`Engine::complete`] may have something new, until it was asked. To be watched level-triggered,
    /// never to be read. What ended already when it was submitted or kicked may not show here.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.executor.event()
    }

    /// Waits for [`Engine::event`]. May return early.
    pub fn wait(&self) {
        let mut poll = libc::pollfd {
            fd: self.event().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd is passed and announced.
        unsafe { libc::poll(&raw mut poll, 1, -1) };
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
            other.place == slot.place
                && other.age.is_some_and(|age| Some(age) < slot.age)
                && other.changes
                && (other.rewrites || slot.rewrites)
                && start < other.blocks.1
                && other.blocks.0 < end
        })
    }

    /// Takes a slot's request as far as it gets without waiting.
    pub(super) fn advance(&mut self, tag: u16) {
        let Slot { operation, place, .. } = &mut self.slots[usize::from(tag)];
        let Some(attached) = &self.disks[*place as usize].attached else {
            return;
        };
        loop {
            match operation.next(&attached.traits) {
                // SAFETY: the file stays attached while a request to it is in flight. The call's iovecs are in
                // memory of the slot's operation, which is not touched until the call is popped, like the memory
                // they name by the contract of `submit`.
                Next::Call(call) => return unsafe { self.executor.push(tag, *place, call) },
                Next::Bounce(_) if self.bounces == BOUNCES => return self.waiting.push_back(tag),
                Next::Bounce(bytes) => {
                    if operation.give_bounce(bytes, attached.traits.align) {
                        self.bounces += 1;
                    }
                }
                Next::Done if operation.is_flush() && attached.image.disk().lost() != 0 => {
                    operation.fail(attached.image.disk().lost());
                }
                Next::Done => return self.end(tag, Ok(())),
                Next::Failed(errno) => return self.fail(tag, errno),
            }
        }
    }

    /// Does with a request that failed what its disk's policy says.
    fn fail(&mut self, tag: u16, errno: i32) {
        let slot = &mut self.slots[usize::from(tag)];
        let place = &mut self.disks[slot.place as usize];
        let generation = place.generation;
        let Some(attached) = &mut place.attached else {
            return;
        };
        if slot.operation.failed_to_sync() {
            attached.note_loss(errno);
        }
        let error = io::Error::from_raw_os_error(errno);
        if attached.policy.holds(errno) {
            slot.held = true;
            if !std::mem::replace(&mut attached.told, true) {
                let place = slot.place;
                let disk = DiskId { place, generation };
                self.stopped.push_back(Stopped { disk, error });
            }
        } else if attached.policy == ErrorPolicy::Ignore {
            slot.operation.zero_rest();
            self.end(tag, Ok(()));
        } else {
            self.end(tag, Err(error));
        }
    }

    /// Ends a request that never began.
    fn refuse(&mut self, tag: u16, place: u32, error: io::Error) {
        let result = Err(error);
        self.ended.push_back((place, Completion { tag, result }));
    }

    pub(super) fn end(&mut self, tag: u16, result: io::Result<()>) {
        let slot = &mut self.slots[usize::from(tag)];
        slot.age = None;
        self.rewriting -= usize::from(slot.rewrites);
        self.bounces -= usize::from(slot.operation.clear());
        self.ended.push_back((slot.place, Completion { tag, result }));
        self.ended_one = true;
    }

    /// Starts what waited for requests that have ended.
    pub(super) fn unblock(&mut self) {
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

impl Drop for Engine {
    fn drop(&mut self) {
        // The kernel must be done with memory that is not ours before its owner can think we are.
        while self.executor.running() > 0 {
            if self.executor.pop().is_none() {
                self.wait();
            }
        }
    }
}
