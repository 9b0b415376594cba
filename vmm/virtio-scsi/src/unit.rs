//! A logical unit with all that belongs to it: its disk, the order of its tasks, and how far its removal is.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use husk_disk::{Disk, DiskId};
use vm_memory::GuestAddress;

use crate::UnitAddress;
use crate::handle::{RemovedUnit, ReplySender, ScsiError};
use crate::passthrough_workers::PassthroughWorkers;
use crate::target::{
    DeviceKind, Identity, InvalidLimits, LogicalUnit, MediumLimits, PassthroughDevice, PassthroughLimits,
};

/// What is in a logical unit.
#[derive(Clone, Debug)]
pub enum Medium {
    /// It is a hard disk.
    Disk(Disk),
    /// It is a CD-ROM drive, with this disc or none.
    CdRom(Option<Disk>),
    /// It is a device of the host.
    Passthrough(PassthroughUnit),
}

/// A device of the host, opened.
#[derive(Clone, Debug)]
pub struct PassthroughUnit {
    /// Who is sent the commands. Closed when the unit is removed.
    pub device: Arc<dyn PassthroughDevice>,
    /// What it is.
    pub limits: PassthroughLimits,
    /// The same device as an image, for a kernel to be read from.
    pub image: Option<Disk>,
}

/// A logical unit to be added.
#[derive(Clone, Debug)]
pub struct NewUnit {
    /// The disk's name in the configuration. No two units have the same.
    pub id: String,
    /// Where.
    pub address: UnitAddress,
    /// Serial number, may be empty.
    pub serial: String,
    /// What.
    pub medium: Medium,
    /// Others may write the disk at the same time.
    pub shareable: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Unit {
    pub id: String,
    pub address: UnitAddress,
    pub logical: LogicalUnit,
    /// None in an empty drive.
    pub disk: Option<DiskId>,
    /// Of a device of the host.
    pub workers: Option<PassthroughWorkers>,
    pub task_set: TaskSet,
    pub removal: Option<Removal>,
    /// The driver asked to be told of other media.
    pub media_events: bool,
}

impl Unit {
    /// A unit that is not attached yet.
    pub fn new(unit: &NewUnit) -> Result<Self, InvalidLimits> {
        let kind = match &unit.medium {
            Medium::Disk(_) => DeviceKind::Disk,
            Medium::CdRom(_) => DeviceKind::CdRom,
            Medium::Passthrough(_) => DeviceKind::Passthrough,
        };
        let identity = Identity::new(kind, Some(&unit.serial), &unit.id);
        let logical = match &unit.medium {
            Medium::Disk(disk) => LogicalUnit::disk(identity, disk_limits(disk, unit.shareable))?,
            Medium::CdRom(disc) => LogicalUnit::cdrom(identity, disc.as_ref().map(disc_limits))?,
            Medium::Passthrough(host) => LogicalUnit::passthrough(identity, host.limits),
        };
        Ok(Self {
            id: unit.id.clone(),
            address: unit.address,
            logical,
            disk: None,
            workers: None,
            task_set: TaskSet::default(),
            removal: None,
            media_events: false,
        })
    }

    /// Whether it can have something to lose when it goes.
    pub fn is_writable(&self) -> bool {
        self.logical.medium().is_some_and(|limits| !limits.read_only)
    }
}

impl NewUnit {
    /// The disk or disc in it.
    pub(crate) fn disk(&self) -> Option<&Disk> {
        match &self.medium {
            Medium::Disk(disk) => Some(disk),
            Medium::CdRom(disc) => disc.as_ref(),
            Medium::Passthrough(_) => None,
        }
    }
}

/// Blocks of a disk as its image is now.
pub(crate) fn blocks(disk: &Disk, block_size: u32) -> u64 {
    disk.size() / u64::from(block_size)
}

fn disk_limits(disk: &Disk, shareable: bool) -> MediumLimits {
    let geometry = disk.geometry();
    let exponent = (geometry.physical_block / geometry.logical_block).max(1).ilog2();
    MediumLimits {
        block_size: geometry.logical_block,
        blocks: blocks(disk, geometry.logical_block),
        physical_exponent: exponent as u8,
        optimal_io: geometry.optimal_io,
        read_only: geometry.read_only,
        write_cache: geometry.write_cache,
        thin: !geometry.read_only,
        discard_granularity: geometry.discard_granularity,
        max_unmap: geometry.max_discard,
        shareable,
        ..MediumLimits::default()
    }
}

/// A disc of blocks of 2048 bytes; what is less than one at the end is not there.
pub(crate) fn disc_limits(disc: &Disk) -> MediumLimits {
    let one = MediumLimits::cd(1);
    MediumLimits::cd(blocks(disc, one.block_size))
}

/// Which of a unit's tasks may run (SAM-5, section 8.6). Those that want to be alone (ordered ones, and those that have
/// a range of the medium for themselves) run when all older ones have ended, and before all younger ones.
#[derive(Debug, Default)]
pub(crate) struct TaskSet {
    /// Begun and not ended.
    pub running: u32,
    /// The one that runs is alone.
    exclusive: bool,
    /// Tags that may not run yet, oldest first.
    waiting: VecDeque<u16>,
}

impl TaskSet {
    /// Lets a new task run, or has it wait. `head`: it goes before all that wait.
    pub fn enter(&mut self, tag: u16, exclusive: bool, head: bool) -> bool {
        if (head || self.waiting.is_empty()) && self.admits(exclusive) {
            self.start(exclusive);
            return true;
        }
        if head {
            self.waiting.push_front(tag);
        } else {
            self.waiting.push_back(tag);
        }
        false
    }

    fn admits(&self, exclusive: bool) -> bool {
        !self.exclusive && (!exclusive || self.running == 0)
    }

    fn start(&mut self, exclusive: bool) {
        self.running += 1;
        self.exclusive = exclusive;
    }

    /// A task that ran has ended. Returns whether others may run now.
    pub fn leave(&mut self, exclusive: bool) -> bool {
        self.running -= 1;
        self.exclusive &= !exclusive;
        !self.waiting.is_empty()
    }

    /// The next that may run now and does from now on. `exclusive` tells what it wants.
    pub fn next(&mut self, exclusive: impl Fn(u16) -> bool) -> Option<u16> {
        let tag = *self.waiting.front()?;
        if !self.admits(exclusive(tag)) {
            return None;
        }
        self.waiting.pop_front();
        self.start(exclusive(tag));
        Some(tag)
    }

    /// Takes a task off that waits.
    pub fn cancel(&mut self, tag: u16) {
        self.waiting.retain(|waiting| *waiting != tag);
    }

    /// Whether there is no task at all.
    pub fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }
}

/// A removal under way.
#[derive(Debug)]
pub(crate) struct Removal {
    pub reply: ReplySender<Result<RemovedUnit, ScsiError>>,
    /// When the driver has had its time.
    pub deadline: Instant,
    pub stage: RemovalStage,
    /// The buffer in which the driver was told.
    pub event_buffer: Option<GuestAddress>,
    /// The driver has given that buffer back.
    pub buffer_returned: bool,
    /// Since when there was no other command, once the driver was told.
    pub last_command: Instant,
    /// The driver, having been told, flushed the cache, and that is the last it asked for.
    pub flushed: bool,
}

/// How long a driver must leave a unit alone for its last command to have been the last.
const QUIET: Duration = Duration::from_millis(100);

/// How often to look whether a driver is done with a unit.
const POLL: Duration = Duration::from_millis(20);

impl Removal {
    pub fn new(reply: ReplySender<Result<RemovedUnit, ScsiError>>, removal_timeout: Duration) -> Self {
        let now = Instant::now();
        Self {
            reply,
            deadline: now + removal_timeout,
            stage: RemovalStage::Serving,
            event_buffer: None,
            buffer_returned: false,
            last_command: now,
            flushed: false,
        }
    }

    /// The driver will read in a buffer that the unit is gone.
    pub fn event_delivered(&mut self, buffer: GuestAddress) {
        self.event_buffer.get_or_insert(buffer);
        self.note_command(false);
    }

    /// A command begins or ends, perhaps that of a flush that succeeded.
    pub fn note_command(&mut self, flushed: bool) {
        self.last_command = Instant::now();
        self.flushed = flushed && self.event_buffer.is_some();
    }

    /// Whether the driver is done with the unit, which it has no commands for. It gives the buffer in which it was told
    /// back when it has done what there is to do, or at once; where there is a cache it flushes that last.
    pub fn is_done(&self, cache: bool, now: Instant) -> bool {
        let quiet = now >= self.last_command + QUIET;
        if cache {
            self.flushed && (self.buffer_returned || quiet)
        } else {
            self.buffer_returned && quiet
        }
    }

    /// When to look again.
    pub fn due(&self, now: Instant) -> Option<Duration> {
        // If it is due and waits all the same, something else ends that.
        let serving = self.stage == RemovalStage::Serving && now < self.deadline;
        let left = self.deadline.saturating_duration_since(now);
        serving.then(|| {
            if self.event_buffer.is_some() {
                left.min(POLL)
            } else {
                left
            }
        })
    }
}

/// What happens to a unit that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemovalStage {
    /// It is there until the driver is done with it.
    Serving,
    /// Its address is free again, its last tasks end.
    Draining,
    /// What they wrote is made stable.
    Flushing,
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXCLUSIVE: fn(u16) -> bool = |tag| tag >= 100;

    #[test]
    fn simple_tasks_run_beside_each_other_and_ordered_ones_between() {
        let mut order = TaskSet::default();
        assert!(order.enter(1, false, false));
        assert!(order.enter(2, false, false));
        assert!(!order.enter(100, true, false));
        assert!(!order.enter(3, false, false));
        assert!(order.leave(false));
        assert_eq!(order.next(EXCLUSIVE), None);
        // One at the head of the queue does not wait for the ordered one.
        assert!(order.enter(4, false, true));
        order.leave(false);
        assert_eq!(order.next(EXCLUSIVE), None);
        order.leave(false);
        assert_eq!(order.next(EXCLUSIVE), Some(100));
        assert_eq!(order.next(EXCLUSIVE), None);
        assert!(!order.enter(5, false, true), "beside one that is exclusive");
        assert!(order.leave(true));
        assert_eq!(
            [
                order.next(EXCLUSIVE),
                order.next(EXCLUSIVE),
                order.next(EXCLUSIVE)
            ],
            [Some(5), Some(3), None]
        );
        order.leave(false);
        assert!(!order.is_idle());
        assert!(!order.leave(false));
        assert!(order.is_idle());
    }

    #[test]
    fn a_cancelled_task_holds_nobody_up() {
        let mut order = TaskSet::default();
        assert!(order.enter(1, false, false));
        assert!(!order.enter(100, true, false));
        assert!(!order.enter(2, false, false));
        order.cancel(100);
        assert_eq!(order.next(EXCLUSIVE), Some(2));
    }
}
