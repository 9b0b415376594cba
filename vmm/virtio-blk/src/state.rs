//! The state of the device across a snapshot, without its medium.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use husk_devices::component::{ComponentState, RestoreError, SaveError, check};
use serde::{Deserialize, Serialize};

use crate::config::QUEUE_SIZE;
use crate::device::Blk;
use crate::queue_io::QueueIo;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BlkState {
    /// Bytes.
    size: u64,
    /// Bytes of a logical block.
    logical_block: u32,
    read_only: bool,
    /// The cache mode that the driver chose: false if writes are durable when they complete.
    writeback: bool,
    queues: Vec<QueueState>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueState {
    /// Chains whose requests are held after an I/O error, or suspended while they write zeroes, in the order of their
    /// arrival. The device has taken them from the available ring. A request is carried out again from its start: what
    /// it did before is done again.
    held: Vec<u16>,
}

fn are_different(heads: &[u16]) -> bool {
    heads.iter().collect::<HashSet<_>>().len() == heads.len()
}

pub(crate) fn save(blk: &Blk) -> Result<ComponentState, SaveError> {
    if blk.shared.disk.lost_writes() {
        let reason = "a flush of the disk failed, and earlier writes may be lost";
        return Err(SaveError::Refused(reason.into()));
    }
    let queue = |(index, slot): (usize, &Option<QueueIo>)| {
        let failed = || SaveError::Refused("a queue of the disk failed".into());
        let held = slot.as_ref().ok_or_else(failed)?.held();
        // Such a state is refused later, when the VM is gone.
        if !are_different(&held) {
            let reason = format!("queue {index}: the driver made a chain available twice");
            return Err(SaveError::Refused(reason));
        }
        Ok(QueueState { held })
    };
    let queues = blk.queue_ios.iter().enumerate().map(queue);
    let queues = queues.collect::<Result<_, _>>()?;
    let geometry = blk.geometry();
    ComponentState::new(&BlkState {
        size: geometry.size,
        logical_block: geometry.logical_block,
        read_only: geometry.read_only,
        writeback: blk.writeback.load(Ordering::Relaxed),
        queues,
    })
}

pub(crate) fn restore(blk: &mut Blk, state: &ComponentState) -> Result<(), RestoreError> {
    let state: BlkState = state.parse()?;
    let geometry = blk.geometry();
    // The image may have grown since the device read its size. The driver is told when the device resumes.
    let enough = state.size <= geometry.size;
    check(enough, "device.size", "is more than that of the disk")?;
    let same = state.logical_block == geometry.logical_block;
    check(same, "device.logical_block", "is not that of the disk")?;
    let same = state.read_only == geometry.read_only;
    check(same, "device.read_only", "is not that of the disk")?;
    let has_cache = !state.writeback || geometry.write_cache;
    check(has_cache, "device.writeback", "is on for a disk without a cache")?;
    let same = state.queues.len() == blk.queue_ios.len();
    check(same, "device.queues", "has another number of queues")?;
    for QueueState { held } in &state.queues {
        let inside = held.iter().all(|head| *head < QUEUE_SIZE);
        check(inside, "device.queues.held", "has a chain outside of the queue")?;
        check(are_different(held), "device.queues.held", "has a chain twice")?;
    }
    let works = blk.queue_ios.iter().all(Option::is_some);
    check(works, "device.queues", "are those of a disk that works")?;
    blk.writeback.store(state.writeback, Ordering::Relaxed);
    for (slot, QueueState { held }) in blk.queue_ios.iter_mut().zip(state.queues) {
        if let Some(queue_io) = slot {
            // What a paused device held before it is restored.
            queue_io.abandon()?;
            queue_io.restore(held);
        }
    }
    Ok(())
}
