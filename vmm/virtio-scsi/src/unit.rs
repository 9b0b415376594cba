//! A logical unit with its disk, its task set and the state of its removal.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use husk_disk::{Disk, DiskId};
use vm_memory::GuestAddress;

use crate::UnitAddress;
use crate::handle::{RemovedUnit, ReplySender, ScsiError};
use crate::new_unit::{Medium, NewUnit};
use crate::passthrough_workers::PassthroughWorkers;
use crate::target::{DeviceKind, Identity, InvalidLimits, LogicalUnit, MediumLimits};

/// A logical unit of the controller.
#[derive(Debug)]
pub(crate) struct Unit {
    pub id: String,
    pub address: UnitAddress,
    pub logical: LogicalUnit,
    /// `None` in an empty drive.
    pub disk: Option<DiskId>,
    /// Threads of a passthrough device.
    pub workers: Option<PassthroughWorkers>,
    pub task_set: TaskSet,
    pub removal: Option<Removal>,
    /// The driver subscribed to media change events.
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

    /// True if it can have unwritten data.
    pub fn is_writable(&self) -> bool {
        self.logical.medium().is_some_and(|limits| !limits.read_only)
    }
}

/// Blocks of a disk, from the current size of its image.
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
        thin: !geometry.read_only && !geometry.preallocated,
        unmapped_are_zeroes: disk.discards_zero(),
        discard_granularity: geometry.discard_granularity,
        max_unmap: geometry.max_discard,
        shareable,
        ..MediumLimits::default()
    }
}

/// Limits of a disc with blocks of 2048 bytes. A part of a block at the end is left out.
pub(crate) fn disc_limits(disc: &Disk) -> MediumLimits {
    let one = MediumLimits::cd(1);
    MediumLimits::cd(blocks(disc, one.block_size))
}

/// The task set of a unit (SAM-5, section 8). An exclusive task (an ordered one, one that runs alone, or one with an
/// exclusive range of the medium) runs after all older tasks have ended and before all younger ones.
#[derive(Debug, Default)]
pub(crate) struct TaskSet {
    /// Tasks that run.
    pub running: u32,
    /// The running task is exclusive.
    exclusive: bool,
    /// Tags of tasks that wait, oldest first.
    waiting: VecDeque<u16>,
}

impl TaskSet {
    /// Adds a new task. Returns true if it runs now, false if it waits. `head`: before all that wait.
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

    /// Removes a running task. Returns true if others may run now.
    pub fn leave(&mut self, exclusive: bool) -> bool {
        self.running -= 1;
        self.exclusive &= !exclusive;
        !self.waiting.is_empty()
    }

    /// Starts the next waiting task that may run now. `exclusive` returns true for exclusive tasks.
    pub fn next(&mut self, exclusive: impl Fn(u16) -> bool) -> Option<u16> {
        let tag = *self.waiting.front()?;
        if !self.admits(exclusive(tag)) {
            return None;
        }
        self.waiting.pop_front();
        self.start(exclusive(tag));
        Some(tag)
    }

    /// Removes a waiting task.
    pub fn cancel(&mut self, tag: u16) {
        self.waiting.retain(|waiting| *waiting != tag);
    }

    /// True if there are no tasks.
    pub fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }
}

/// The state of a removal.
#[derive(Debug)]
pub(crate) struct Removal {
    pub reply: ReplySender<Result<RemovedUnit, ScsiError>>,
    /// Deadline of the removal.
    pub deadline: Instant,
    pub stage: RemovalStage,
    /// The buffer of the event that announced the removal.
    pub event_buffer: Option<GuestAddress>,
    /// The driver returned that buffer.
    pub buffer_returned: bool,
    /// Time of the last command, or of the event if that was later.
    pub last_command: Instant,
    /// The driver flushed the cache after the event, and sent no other command since.
    pub flushed: bool,
}

/// Time without commands after which a driver's last command counts as its final one.
const QUIET: Duration = Duration::from_millis(100);

/// Interval of checks if the driver is done with a unit.
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

    /// Records the event that announces the removal.
    pub fn event_delivered(&mut self, buffer: GuestAddress) {
        self.event_buffer.get_or_insert(buffer);
        self.note_command(false);
    }

    /// Records the start or end of a command. `flushed`: a flush succeeded.
    pub fn note_command(&mut self, flushed: bool) {
        self.last_command = Instant::now();
        self.flushed = flushed && self.event_buffer.is_some();
    }

    /// True if the driver is done with the idle unit. The driver returns the event's buffer after it has removed the
    /// unit, or at once; if there is a cache, it flushes that last.
    pub fn is_done(&self, cache: bool, now: Instant) -> bool {
        let quiet = now >= self.last_command + QUIET;
        if cache {
            self.flushed && (self.buffer_returned || quiet)
        } else {
            self.buffer_returned && quiet
        }
    }

    /// Time until the next check, zero if the deadline has passed. While the VM is paused the deadline means nothing,
    /// and activation ends the wait.
    pub fn due(&self, now: Instant, paused: bool) -> Option<Duration> {
        let left = self.deadline.saturating_duration_since(now);
        if self.stage != RemovalStage::Serving || paused && left.is_zero() {
            return None;
        }
        Some(match self.event_buffer {
            Some(_) => left.min(POLL),
            None => left,
        })
    }
}

/// Stage of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemovalStage {
    /// The unit is served until the driver is done with it.
    Serving,
    /// The address is free, the last tasks are ending.
    Draining,
    /// The disk is flushed.
    Flushing,
}

#[cfg(test)]
mod tests {
    use husk_disk::DiskOptions;

    use super::*;

    const EXCLUSIVE: fn(u16) -> bool = |tag| tag >= 100;

    #[test]
    fn a_preallocated_disk_is_not_thin() {
        for preallocated in [false, true] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(4096).unwrap();
            let options = DiskOptions {
                preallocated,
                ..DiskOptions::default()
            };
            let disk = Disk::open_raw(file.into(), options).unwrap();
            let limits = disk_limits(&disk, false);
            assert!(limits.thin != preallocated && limits.unmapped_are_zeroes);
        }
    }

    #[test]
    fn simple_tasks_run_in_parallel_and_ordered_ones_alone() {
        let mut order = TaskSet::default();
        assert!(order.enter(1, false, false));
        assert!(order.enter(2, false, false));
        assert!(!order.enter(100, true, false));
        assert!(!order.enter(3, false, false));
        assert!(order.leave(false));
        assert_eq!(order.next(EXCLUSIVE), None);
        // A task at the head of the queue does not wait for the ordered one.
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
    fn a_cancelled_task_blocks_no_other_task() {
        let mut order = TaskSet::default();
        assert!(order.enter(1, false, false));
        assert!(!order.enter(100, true, false));
        assert!(!order.enter(2, false, false));
        order.cancel(100);
        assert_eq!(order.next(EXCLUSIVE), Some(2));
    }

    #[test]
    fn a_removal_whose_deadline_has_passed_is_due_at_once() {
        let (reply, _) = tokio::sync::oneshot::channel();
        let removal = Removal::new(reply, Duration::from_secs(5));
        let second = Duration::from_secs(1);
        assert_eq!(removal.due(removal.deadline - second, false), Some(second));
        let late = removal.deadline + second;
        assert_eq!(removal.due(late, false), Some(Duration::ZERO));
        assert_eq!(removal.due(late, true), None);
    }
}
