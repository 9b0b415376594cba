//! The engine of one worker: a stream of requests to any number of disks, and of their completions.

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
#[cfg(test)]
mod tests;

/// A disk attached to an [`Engine`]. No other disk ever gets the same from that engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiskId {
    slot: u32,
    /// Which of those who had the place one after another.
    generation: u32,
}

/// A disk that began to hold requests.
#[derive(Debug)]
pub struct StoppedDisk {
    /// Which.
    pub disk: DiskId,
    /// What happened to the first of them.
    pub error: io::Error,
}

/// Serves requests to disks. Owned by one worker at a time; dropping it waits for what the kernel is doing.
///
/// Tags are shared by all disks. A round of work is: any number of [`Engine::submit`], one [`Engine::kick`] for all of
/// them, and [`Engine::complete`] until there is nothing; then wait for [`Engine::event`].
#[derive(Debug)]
pub struct Engine {
    backends: BackendSet,
    depth: u16,
    /// By place.
    disks: Vec<DiskSlot>,
    free_slots: Vec<u32>,
    /// By tag, as many as were ever used.
    requests: Vec<RequestState>,
    /// Slots that wait for others, oldest first.
    waiting: VecDeque<u16>,
    /// Requests that ended, and the place of their disk.
    ended: VecDeque<(u32, IoCompletion)>,
    stopped: VecDeque<StoppedDisk>,
    /// A request ended since what waits was last looked at.
    ended_one: bool,
    bounces: usize,
    /// Requests not completed that rewrite parts of blocks they do not own.
    rewriting: usize,
    next_age: u64,
    /// Why nothing could be sent.
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
    /// Requests whose completion was not returned.
    in_flight: u16,
    /// The owner knows that requests are held.
    stop_reported: bool,
}

#[derive(Debug, Default)]
struct RequestState {
    operation: Operation,
    slot: u32,
    /// Order of arrival, none if the slot is free.
    age: Option<u64>,
    /// The blocks of the disk it touches.
    blocks: (u64, u64),
    /// Whether it changes them, and whether it writes back parts of them that are not its own.
    changes: bool,
    rewrites: bool,
    /// It failed, and waits to be retried.
    held: bool,
}

impl Engine {
    /// An engine for `depth` requests at once to at most `max_disks` disks attached at once (fewer if the process
    /// cannot have as many open). Makes every kernel object it will ever need, so that it is made before a seccomp
    /// filter is in place; afterwards it needs `io_uring_enter`, and `io_uring_register` to update files.
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
            rewriting: 0,
            next_age: 0,
            broken: None,
        }
    }

    /// Requests that can be in flight over all disks; tags are below it.
    #[must_use]
    pub fn depth(&self) -> u16 {
        self.depth
    }

    /// Begins to serve a disk, with its own error policy. With the first one that is not a plain file or block
    /// device, [`Engine::event`] is another from then on.
    ///
    /// # Errors
    /// `QuotaExceeded`: as many as can be are attached. `ResourceBusy`: another engine serves it, and it
    /// [needs one engine](Disk::needs_one_engine). Else the kernel's.
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
                punch: true,
                zero_range: true,
            },
            policy: disk.error_policy(),
            in_flight: 0,
            stop_reported: false,
        });
        let generation = entry.generation;
        Ok(DiskId { slot, generation })
    }

    /// Stops serving a disk. When it returns and nobody else has a handle to the disk, its descriptor is closed.
    /// (Before Linux 6.13 the kernel lets go of it only when what other disks had in flight has ended.)
    ///
    /// # Errors
    /// `NotFound`: it is not attached. `ResourceBusy`: a request is in flight; also one that is held, see
    /// [`Engine::fail_held`], or whose completion was not fetched. Then the disk stays attached.
    pub fn detach(&mut self, disk: DiskId) -> io::Result<()> {
        if self.attached(disk)?.in_flight > 0 {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        self.backends.detach(disk.slot)?;
        let slot = &mut self.disks[disk.slot as usize];
        slot.attached = None;
        slot.generation = slot.generation.wrapping_add(1);
        self.free_slots.push(disk.slot);
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

    /// The disk attached under an id.
    #[must_use]
    pub fn disk(&self, disk: DiskId) -> Option<&Disk> {
        let slot = self.disks.get(disk.slot as usize)?;
        let attached = slot.attached.as_ref()?;
        (slot.generation == disk.generation).then_some(attached.image.disk())
    }

    /// Requests of a disk that were submitted and whose completion was not returned yet, held ones included.
    #[must_use]
    pub fn in_flight(&self, disk: DiskId) -> usize {
        let slot = self.disks.get(disk.slot as usize);
        let attached = slot
            .filter(|slot| slot.generation == disk.generation)
            .and_then(|slot| slot.attached.as_ref());
        attached.map_or(0, |attached| attached.in_flight.into())
    }

    /// Whether the kernel is at work on a request, or there is something to complete. What is held, or waits for what
    /// is held, is nothing of the kind: when this is false, [`Engine::complete`] stays silent until something is
    /// submitted or retried.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.backends.running() > 0 || !self.ended.is_empty()
    }

    /// Has another error policy apply to a disk, from the next error on.
    ///
    /// # Errors
    /// `NotFound`: it is not attached.
    pub fn set_error_policy(&mut self, disk: DiskId, policy: ErrorPolicy) -> io::Result<()> {
        self.attached(disk)?.policy = policy;
        Ok(())
    }

    /// The next disk that began to hold requests: each is named once until [`Engine::retry_held`].
    pub fn take_stopped(&mut self) -> Option<StoppedDisk> {
        self.stopped.pop_front()
    }

    /// Tries again what is held of a disk, oldest first. To be kicked, like what is submitted. A disk that is not
    /// attached holds nothing.
    pub fn retry_held(&mut self, disk: DiskId) {
        let Ok(attached) = self.attached(disk) else {
            return;
        };
        attached.stop_reported = false;
        let size = attached.image.disk().size();
        self.stopped.retain(|stopped| stopped.disk != disk);
        for tag in self.release_held(disk.slot) {
            let operation = &mut self.requests[usize::from(tag)].operation;
            if operation.end() > size {
                // The disk shrank meanwhile.
                self.end(tag, Err(io::ErrorKind::InvalidInput.into()));
            } else {
                operation.retry();
                self.advance(tag);
            }
        }
        self.unblock();
    }

    /// Completes what is held of a disk with the errors it is held for.
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

    /// The tags that were held at a place, oldest first.
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
