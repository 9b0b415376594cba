//! The way of a request through the engine: checked, delayed if it conflicts with another, carried out call by call,
//! held after an error, completed.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{AttachedDisk, DiskId, Engine, RequestState, StoppedDisk};
use crate::io_backend::IoCall;
use crate::operation::{NextAction, OperationKind};
use crate::{ErrorPolicy, IoBuffer, IoCompletion, IoRequest};

/// Maximum number of bounce buffers of one engine, each of at most 256 KiB.
pub(super) const BOUNCES: usize = 4;

/// Stands for the slot of a disk that is not attached.
const NO_SLOT: u32 = u32::MAX;

/// A request that was checked against its disk.
struct CheckedRequest {
    kind: OperationKind,
    offset: u64,
    len: u64,
    durable: bool,
}

impl AttachedDisk {
    fn check(&self, request: &IoRequest<'_>) -> io::Result<CheckedRequest> {
        let (kind, offset, len, durable) = match *request {
            IoRequest::Read { offset, buffers } => (OperationKind::Read, offset, total(buffers)?, false),
            IoRequest::Write {
                offset,
                buffers,
                durable,
            } => (OperationKind::Write, offset, total(buffers)?, durable),
            IoRequest::Flush => (OperationKind::Flush, 0, 0, false),
            IoRequest::Discard { offset, len, durable } => (OperationKind::Discard, offset, len, durable),
            IoRequest::WriteZeroes {
                offset,
                len,
                unmap,
                durable,
            } => (OperationKind::Zero { unmap }, offset, len, durable),
        };
        let geometry = self.image.disk().geometry();
        if geometry.read_only && !matches!(kind, OperationKind::Read | OperationKind::Flush) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let end = offset.checked_add(len).filter(|end| *end <= geometry.size);
        if end.is_none() || !(offset | len).is_multiple_of(geometry.logical_block.into()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(CheckedRequest {
            kind,
            offset,
            len,
            durable: durable || !geometry.write_cache,
        })
    }
}

fn total(buffers: &[IoBuffer]) -> io::Result<u64> {
    let add = |sum: u64, buffer: &IoBuffer| sum.checked_add(buffer.len() as u64);
    buffers
        .iter()
        .try_fold(0, add)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

impl Engine {
    /// Takes a request. It may wait for [`Engine::kick`]. A request that does not fit the disk (behind its end, a write
    /// to a read-only disk, not whole logical blocks) completes with `InvalidInput` or `PermissionDenied`, a request to
    /// a disk that is not attached with `NotFound`.
    ///
    /// # Safety
    /// `tag` is below [`Engine::depth`] and not in flight (checked; panics). Until the request's completion was
    /// returned or the engine was dropped, every buffer is valid memory, for reads or writes as the request needs.
    /// Others may access it in the meantime.
    pub unsafe fn submit(&mut self, tag: u16, disk: DiskId, request: IoRequest<'_>) {
        assert!(tag < self.depth, "tag {tag} is beyond the engine's depth");
        let index = usize::from(tag);
        if self.requests.len() <= index {
            // The kernel holds no pointers into the vector that moves here: lists of buffers and bounce buffers are on
            // the heap.
            let len = (index + 1).next_power_of_two().min(self.depth.into());
            self.requests.resize_with(len, RequestState::default);
        }
        assert!(self.requests[index].age.is_none(), "tag {tag} is in flight");
        let attached = match self.attached(disk) {
            Ok(attached) => attached,
            Err(error) => return self.refuse(tag, NO_SLOT, error),
        };
        attached.in_flight += 1;
        let checked = attached.check(&request);
        let align = attached.traits.align;
        let failed_syncs = attached.image.disk().syncs().failed();
        let CheckedRequest {
            kind,
            offset,
            len,
            durable,
        } = match checked {
            Ok(checked) => checked,
            Err(error) => return self.refuse(tag, disk.slot, error),
        };
        let buffers = match request {
            IoRequest::Read { buffers, .. } | IoRequest::Write { buffers, .. } => buffers,
            _ => &[],
        };
        let request = &mut self.requests[index];
        request.operation.begin(kind, offset, len, buffers, durable);
        request.slot = disk.slot;
        request.len = len;
        request.abandoned = false;
        (request.failed_syncs, request.synced) = (failed_syncs, None);
        request.age = Some(self.next_age);
        request.blocks = request.operation.blocks(align);
        request.changes = request.operation.changes();
        request.rewrites = request.operation.rewrites(align);
        self.next_age += 1;
        self.rewriting += usize::from(request.rewrites);
        if self.must_wait(tag) {
            self.waiting.push_back(tag);
        } else {
            self.advance(tag);
            self.unblock();
        }
    }

    /// Submits all requests to the kernel. Makes no system call if there are none.
    ///
    /// # Errors
    /// The engine is broken, perhaps since an earlier [`Engine::complete`]: only calls that the kernel already has will
    /// complete.
    pub fn kick(&mut self) -> io::Result<()> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        self.backends.submit().map(|_| ())
    }

    /// The next completed request. Never waits. Before it returns `None` it submits what is left to submit, such as the
    /// rest of a request of which the kernel did a part.
    pub fn complete(&mut self) -> Option<IoCompletion> {
        while self.ended.is_empty() {
            let Some((tag, result)) = self.backends.pop() else {
                match self.backends.submit() {
                    Ok(true) => continue,
                    Ok(false) => return None,
                    Err(error) => {
                        self.broken = Some(error);
                        return None;
                    }
                }
            };
            let request = &mut self.requests[usize::from(tag)];
            match &mut self.disks[request.slot as usize].attached {
                Some(attached) if attached.is_sync(tag) => self.synced(tag, result),
                Some(attached) => {
                    request.operation.call_done(result, &mut attached.traits);
                    self.advance(tag);
                }
                None => {}
            }
            self.unblock();
        }
        let (slot, completion) = self.ended.pop_front()?;
        let slot = self.disks.get_mut(slot as usize);
        if let Some(attached) = slot.and_then(|slot| slot.attached.as_mut()) {
            attached.in_flight -= 1;
        }
        Some(completion)
    }

    /// Readable when [`Engine::complete`] may return something new, until it is called. Watch it level-triggered; never
    /// read it. Completions that were ready when a request was submitted or kicked may not show here.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.backends.event()
    }

    /// Waits for [`Engine::event`]. May return early.
    pub fn wait(&self) {
        let mut poll = libc::pollfd {
            fd: self.event().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd is passed, and the count says one.
        unsafe { libc::poll(&raw mut poll, 1, -1) };
    }

    /// True if `tag` must not start yet. A request that reads, modifies and writes blocks would undo another change of
    /// these blocks, so it waits for every older one, and younger ones wait for it.
    fn must_wait(&self, tag: u16) -> bool {
        let request = &self.requests[usize::from(tag)];
        if self.rewriting == 0 || !request.changes {
            return false;
        }
        let (start, end) = request.blocks;
        self.requests.iter().any(|other| {
            other.slot == request.slot
                && other.age.is_some_and(|age| Some(age) < request.age)
                && other.changes
                && (other.rewrites || request.rewrites)
                && start < other.blocks.1
                && other.blocks.0 < end
        })
    }

    /// Advances a request as far as it gets without waiting.
    pub(super) fn advance(&mut self, tag: u16) {
        if self.begins_zeroes(tag) && !self.may_zero(tag) {
            return;
        }
        let RequestState {
            operation,
            slot,
            len,
            failed_syncs,
            synced,
            ..
        } = &mut self.requests[usize::from(tag)];
        let Some(attached) = &self.disks[*slot as usize].attached else {
            return;
        };
        loop {
            match operation.next(&attached.traits) {
                NextAction::IoCall(IoCall::Sync) => return self.sync(tag),
                // SAFETY: the file stays attached while a request to it is in flight. The call's iovecs are in memory
                // of the request's operation, which nothing touches until the call is popped, like the memory that they
                // name by the contract of `submit`.
                NextAction::IoCall(call) => return unsafe { self.backends.push(tag, *slot, call) },
                NextAction::Bounce(_) if self.bounces == BOUNCES => return self.waiting.push_back(tag),
                NextAction::Bounce(bytes) => {
                    if operation.set_bounce_buffer(bytes, attached.traits.align) {
                        self.bounces += 1;
                    }
                }
                NextAction::Done if operation.is_flush() && attached.image.disk().flush_error() != 0 => {
                    operation.fail(attached.image.disk().flush_error());
                }
                NextAction::Done
                    if synced.is_some()
                        && !operation.is_flush()
                        && attached.image.disk().syncs().failed() != *failed_syncs =>
                {
                    operation.fail(attached.image.disk().syncs().errno());
                }
                NextAction::Done => {
                    attached.image.totals().count(operation.kind(), *len);
                    return self.end(tag, Ok(()));
                }
                NextAction::Failed(errno) => return self.fail(tag, errno),
            }
        }
    }

    /// Applies the disk's error policy to a request that failed.
    fn fail(&mut self, tag: u16, errno: i32) {
        let request = &mut self.requests[usize::from(tag)];
        let slot = &mut self.disks[request.slot as usize];
        let generation = slot.generation;
        let Some(attached) = &mut slot.attached else {
            return;
        };
        let error = io::Error::from_raw_os_error(errno);
        if request.operation.failed_to_write() {
            attached.note_late_error(errno);
        }
        if attached.policy.holds(errno) {
            request.held = true;
            if !std::mem::replace(&mut attached.stop_reported, true) {
                let slot = request.slot;
                let disk = DiskId { slot, generation };
                self.stopped.push_back(StoppedDisk { disk, error });
            }
        } else if attached.policy == ErrorPolicy::Ignore {
            request.operation.zero_rest();
            self.end(tag, Ok(()));
        } else {
            self.end(tag, Err(error));
        }
    }

    /// Completes a request that was not started.
    fn refuse(&mut self, tag: u16, slot: u32, error: io::Error) {
        let result = Err(error);
        self.ended.push_back((slot, IoCompletion { tag, result }));
    }

    pub(super) fn end(&mut self, tag: u16, result: io::Result<()>) {
        let request = &mut self.requests[usize::from(tag)];
        request.age = None;
        self.rewriting -= usize::from(request.rewrites);
        self.bounces -= usize::from(request.operation.clear());
        self.ended.push_back((request.slot, IoCompletion { tag, result }));
        self.ended_one = true;
    }

    /// Starts requests that waited for requests that have ended.
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
        // The kernel must be done with the callers' memory before the engine is gone.
        while self.backends.running() > 0 {
            match self.backends.pop() {
                Some((tag, result)) => self.end_sync(tag, result),
                None => self.wait(),
            }
        }
        self.end_unsent_syncs();
    }
}
