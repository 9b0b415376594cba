//! The I/O engine of one worker: takes requests to any number of disks and returns their completions.

use std::collections::VecDeque;
use std::io;

use crate::backend_set::BackendSet;
use crate::disk::{Attachment, Disk};
use crate::io_backend::IoBackend;
use crate::operation::{FileTraits, Operation};
use crate::thread_backend::ThreadBackend;
use crate::uring_backend::UringBackend;
use crate::{EngineKind, ErrorPolicy, IoCompletion};

mod requests;
mod sync;
#[cfg(test)]
mod tests;
mod zeroing;

/// Identifies a disk attached to an [`Engine`]. The engine never reuses an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiskId {
    slot: u32,
    /// Incremented each time the slot is reused.
    generation: u32,
}

/// A disk that began to hold requests.
#[derive(Debug)]
pub struct StoppedDisk {
    /// The disk.
    pub disk: DiskId,
    /// The error of the first held request.
    pub error: io::Error,
}

/// Serves requests to disks. One worker at a time owns it. Dropping it waits for the calls that the kernel executes.
///
/// All disks share the tags. A worker calls [`Engine::submit`] any number of times, [`Engine::kick`] once for all of
/// them, [`Engine::complete`] until it returns nothing, and waits for [`Engine::event`].
#[derive(Debug)]
pub struct Engine {
    backends: BackendSet,
    depth: u16,
    /// Indexed by slot.
    disks: Vec<DiskSlot>,
    free_slots: Vec<u32>,
    /// Indexed by tag; as long as the highest tag used so far.
    requests: Vec<RequestState>,
    /// Tags of requests that wait for other requests, oldest first.
    waiting: VecDeque<u16>,
    /// Completed requests and the slots of their disks.
    ended: VecDeque<(u32, IoCompletion)>,
    stopped: VecDeque<StoppedDisk>,
    /// A request ended since `waiting` was last checked.
    ended_one: bool,
    bounces: usize,
    /// See [`Engine::suspend_zeroing`].
    zeroing_suspended: bool,
    /// Tags of the requests that wait for [`Engine::resume_zeroing`], oldest first.
    suspended: Vec<u16>,
    /// Requests in flight that rewrite parts of blocks outside their range.
    rewriting: usize,
    next_age: u64,
    /// Error of a failed submission, not returned yet.
    broken: Option<io::Error>,
}

#[derive(Debug, Default)]
struct DiskSlot {
    generation: u32,
    attached: Option<AttachedDisk>,
}

#[derive(Debug)]
struct AttachedDisk {
    image: Attachment,
    traits: FileTraits,
    policy: ErrorPolicy,
    /// Requests whose completion was not returned yet.
    in_flight: u16,
    /// The owner has taken the [`StoppedDisk`] of this disk, or will.
    stop_reported: bool,
    syncs: GroupSync,
}

/// The syncs of one disk: one at a time, for all requests that wait for it.
#[derive(Debug, Default)]
struct GroupSync {
    /// Number of the running sync, see [`Syncs`](crate::syncs::Syncs).
    number: u64,
    /// Tags of the requests that it serves. The first one is the call's.
    running: Vec<u16>,
    /// Tags of the requests for the next sync.
    waiting: Vec<u16>,
}

#[derive(Debug, Default)]
struct RequestState {
    operation: Operation,
    slot: u32,
    /// Bytes of the whole request.
    len: u64,
    /// Order of arrival; `None` if the tag is free.
    age: Option<u64>,
    /// The blocks of the disk that it touches, as byte offsets.
    blocks: (u64, u64),
    /// It changes these blocks; it also rewrites bytes of them outside its range.
    changes: bool,
    rewrites: bool,
    /// It failed and waits for a retry.
    held: bool,
    /// See [`Engine::abandon_zeroing`].
    abandoned: bool,
    /// Failed syncs of the disk before it began.
    failed_syncs: u64,
    /// It was synced, while only syncs with lower numbers ran.
    synced: Option<u64>,
}

impl Engine {
    /// An engine for `depth` requests at once and `max_disks` attached disks, or fewer if the process cannot open as
    /// many files. It creates all its kernel objects here, before a seccomp filter is installed. Afterwards it needs
    /// `io_uring_enter`, and `io_uring_register` to update files.
    ///
    /// # Errors
    /// The kernel refuses a ring ([`EngineKind::Uring`]) or threads.
    pub fn new(kind: EngineKind, depth: u16, max_disks: u32) -> io::Result<Self> {
        let backend: Box<dyn IoBackend> = match kind {
            EngineKind::Threads => Box::new(ThreadBackend::new(max_disks)?),
            EngineKind::Uring => Box::new(UringBackend::new(depth, max_disks)?),
            EngineKind::Auto => match UringBackend::new(depth, max_disks) {
                Ok(ring) => Box::new(ring),
                Err(error) => {
                    tracing::warn!(%error, "io_uring is not available, disks are served by threads");
                    Box::new(ThreadBackend::new(max_disks)?)
                }
            },
        };
        Ok(Self::with_backend(backend, depth))
    }

    pub(crate) fn with_backend(backend: Box<dyn IoBackend>, depth: u16) -> Self {
        Self {
            backends: BackendSet::new(backend),
            depth,
            disks: Vec::new(),
            free_slots: Vec::new(),
            requests: Vec::new(),
            waiting: VecDeque::new(),
            ended: VecDeque::new(),
            stopped: VecDeque::new(),
            ended_one: false,
            bounces: 0,
            zeroing_suspended: false,
            suspended: Vec::new(),
            rewriting: 0,
            next_age: 0,
            broken: None,
        }
    }

    /// Maximum number of requests in flight over all disks. Tags are below it.
    #[must_use]
    pub fn depth(&self) -> u16 {
        self.depth
    }

    /// Attaches a disk, with the disk's own error policy. The first qcow2 image or block device changes the descriptor
    /// that [`Engine::event`] returns.
    ///
    /// # Errors
    /// `QuotaExceeded`: the maximum number of disks is attached. `ResourceBusy`: another engine serves the disk, and it
    /// [needs one engine](Disk::needs_one_engine). Else the kernel's error.
    pub fn attach(&mut self, disk: &Disk) -> io::Result<DiskId> {
        let image = Attachment::new(disk)?;
        let new = self.free_slots.is_empty();
        let slot = match self.free_slots.last() {
            Some(slot) => *slot,
            None => self.disks.len() as u32,
        };
        if slot >= self.backends.max_files() {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        self.backends.attach(slot, disk.backend())?;
        if new {
            self.disks.push(DiskSlot::default());
        } else {
            self.free_slots.pop();
        }
        let entry = &mut self.disks[slot as usize];
        entry.attached = Some(AttachedDisk {
            image,
            traits: FileTraits {
                align: disk.align(),
                discard: !disk.geometry().preallocated,
                discard_block: disk.backend().discard_block(),
                punch: !disk.geometry().preallocated,
                zero_range: true,
            },
            policy: disk.error_policy(),
            in_flight: 0,
            stop_reported: false,
            syncs: GroupSync::default(),
        });
        let generation = entry.generation;
        self.count_disks();
        Ok(DiskId { slot, generation })
    }

    fn count_disks(&mut self) {
        self.backends.set_disks(self.disks.len() - self.free_slots.len());
    }

    /// Detaches a disk. Afterwards its descriptor is closed if no other handle to the disk exists. (Before Linux 6.13
    /// the kernel releases the file only when the requests that other disks had in flight have ended.)
    ///
    /// # Errors
    /// `NotFound`: the disk is not attached. `ResourceBusy`: a request is in flight, held (see [`Engine::fail_held`]),
    /// or completed and not fetched. The disk stays attached then.
    pub fn detach(&mut self, disk: DiskId) -> io::Result<()> {
        if self.attached(disk)?.in_flight > 0 {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        self.backends.detach(disk.slot)?;
        let slot = &mut self.disks[disk.slot as usize];
        slot.attached = None;
        slot.generation = slot.generation.wrapping_add(1);
        self.free_slots.push(disk.slot);
        self.count_disks();
        self.stopped.retain(|stopped| stopped.disk != disk);
        Ok(())
    }

    fn attached(&mut self, disk: DiskId) -> io::Result<&mut AttachedDisk> {
        match self.disks.get_mut(disk.slot as usize) {
            Some(DiskSlot {
                generation,
                attached: Some(attached),
            }) if *generation == disk.generation => Ok(attached),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// The disk attached under `disk`.
    #[must_use]
    pub fn disk(&self, disk: DiskId) -> Option<&Disk> {
        let slot = self.disks.get(disk.slot as usize)?;
        let attached = slot.attached.as_ref()?;
        (slot.generation == disk.generation).then_some(attached.image.disk())
    }

    /// Requests of a disk whose completion was not returned yet, including held ones.
    #[must_use]
    pub fn in_flight(&self, disk: DiskId) -> usize {
        let slot = self.disks.get(disk.slot as usize);
        let attached = slot
            .filter(|slot| slot.generation == disk.generation)
            .and_then(|slot| slot.attached.as_ref());
        attached.map_or(0, |attached| attached.in_flight.into())
    }

    /// True if the kernel executes a request or a completion is ready. Held and suspended requests, and requests that
    /// wait for them, do not count: while this is false, [`Engine::complete`] returns nothing until a request is
    /// submitted, retried or resumed.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.backends.running() > 0 || !self.ended.is_empty()
    }

    /// Sets the error policy of a disk, from the next error on.
    ///
    /// # Errors
    /// `NotFound`: the disk is not attached.
    pub fn set_error_policy(&mut self, disk: DiskId, policy: ErrorPolicy) -> io::Result<()> {
        self.attached(disk)?.policy = policy;
        Ok(())
    }

    /// The next disk that began to hold requests. Each disk is returned once until [`Engine::retry_held`].
    pub fn take_stopped(&mut self) -> Option<StoppedDisk> {
        self.stopped.pop_front()
    }

    /// Retries the held requests of a disk, oldest first. Call [`Engine::kick`] afterwards. Does nothing for a disk
    /// that is not attached.
    pub fn retry_held(&mut self, disk: DiskId) {
        let Ok(attached) = self.attached(disk) else {
            return;
        };
        attached.stop_reported = false;
        let size = attached.image.disk().size();
        let failed_syncs = attached.image.disk().syncs().failed();
        self.stopped.retain(|stopped| stopped.disk != disk);
        for tag in self.release_held(disk.slot) {
            let request = &mut self.requests[usize::from(tag)];
            let before = std::mem::replace(&mut request.failed_syncs, failed_syncs);
            request.synced = None;
            let operation = &mut request.operation;
            if operation.end() > size {
                // The disk shrank in the meantime.
                self.end(tag, Err(io::ErrorKind::InvalidInput.into()));
            } else {
                match before == failed_syncs || operation.is_flush() {
                    true => operation.retry(),
                    // The page cache may have dropped the part that was written before it failed.
                    false => operation.restart(),
                }
                self.advance(tag);
            }
        }
        self.unblock();
    }

    /// Completes the held requests of a disk with their errors.
    pub fn fail_held(&mut self, disk: DiskId) {
        if self.attached(disk).is_err() {
            return;
        }
        for tag in self.release_held(disk.slot) {
            let errno = self.requests[usize::from(tag)].operation.errno();
            self.end(tag, Err(io::Error::from_raw_os_error(errno)));
        }
        self.unblock();
    }

    /// Releases the held requests of a disk and returns their tags, oldest first.
    fn release_held(&mut self, slot: u32) -> Vec<u16> {
        let mut released: Vec<_> = (0..)
            .zip(&mut self.requests)
            .filter(|(_, request)| request.slot == slot && request.age.is_some() && request.held)
            .map(|(tag, request)| {
                request.held = false;
                (request.age, tag)
            })
            .collect();
        released.sort_unstable();
        released.into_iter().map(|(_, tag)| tag).collect()
    }
}
