//! Adds, resizes and removes logical units.

use std::io;
use std::time::{Duration, Instant};

use husk_disk::{Disk, IoRequest};

use super::Controller;
use super::tasks::RequestOutcome;
use crate::UnitAddress;
use crate::handle::{RemovedUnit, ReplySender, ScsiError, UnitInfo};
use crate::new_unit::{Medium, NewUnit};
use crate::pending_events::UnitEvent;
use crate::request::ResponseCode;
use crate::target::{DeviceKind, InvalidLimits, LogicalUnit, Lun, MediumLimits};
use crate::task_slots::SlotUse;
use crate::unit::{Removal, RemovalStage, Unit, blocks};

impl Controller {
    pub fn add(&mut self, new: NewUnit) -> Result<(), ScsiError> {
        let address = new.address;
        if address.target > self.config.max_target {
            return Err(ScsiError::Target(address.target, self.config.max_target));
        }
        if let Some(unit) = self
            .table
            .by_id(&new.id)
            .and_then(|unit_index| self.table.unit(unit_index))
        {
            return if unit.removal.is_some() {
                Err(ScsiError::Removing(new.id))
            } else if unit.address == address {
                Ok(())
            } else {
                Err(ScsiError::Elsewhere(new.id, unit.address))
            };
        }
        let there = self
            .table
            .find(address)
            .and_then(|unit_index| self.table.unit(unit_index));
        if let Some(unit) = there {
            return Err(ScsiError::Occupied(address, unit.id.clone()));
        }
        self.poll_event_buffers();
        if self.unacknowledged.contains_key(&address) {
            return Err(ScsiError::NotReleased(address));
        }
        let mut unit = Unit::new(&new).map_err(|bad| ScsiError::Medium(new.id.clone(), bad))?;
        if let Some(disk) = new.disk() {
            let attached = self.engine.attach(disk);
            unit.disk = Some(attached.map_err(|error| ScsiError::Io(new.id.clone(), error))?);
        }
        if let Medium::Passthrough(host) = &new.medium {
            let workers = self.passthrough.workers(host.device.clone());
            unit.workers = Some(workers.map_err(|error| ScsiError::Io(new.id.clone(), error))?);
        }
        self.table.insert(unit);
        self.events.post(address, UnitEvent::Added);
        // Interrupts the driver first: its scan takes longest, and should not wait for the log and the caller.
        self.deliver();
        self.virtqueues.signal();
        self.luns_changed(address.target);
        tracing::info!(disk = new.id, %address, "added");
        Ok(())
    }

    /// Adds a unit at the lowest LUN of its target that neither a unit has, one that is being removed included, nor the
    /// driver may still use for the unit that had it last. Returns its address.
    pub fn add_at_free_lun(&mut self, mut new: NewUnit) -> Result<UnitAddress, ScsiError> {
        let present = self.table.by_id(&new.id);
        if let Some(unit) = present.and_then(|unit_index| self.table.unit(unit_index)) {
            return if unit.removal.is_some() {
                Err(ScsiError::Removing(new.id))
            } else {
                Ok(unit.address)
            };
        }
        self.poll_event_buffers();
        let target = new.address.target;
        let units = self.table.iter().map(|(_, unit)| unit.address);
        let mut used: Vec<Lun> = units
            .chain(self.unacknowledged.keys().copied())
            .filter(|address| address.target == target)
            .map(|address| address.lun)
            .collect();
        used.sort_unstable();
        used.dedup();
        let without_gap = used.iter().zip(0..).take_while(|(lun, at)| lun.number() == *at);
        let free = without_gap.count() as u16;
        new.address.lun = Lun::new(free).ok_or(ScsiError::Full(target))?;
        let address = new.address;
        self.add(new).map(|()| address)
    }

    /// Establishes REPORTED LUNS DATA HAS CHANGED on a target's units if the driver does not get events. For a driver
    /// with events the next command of every unit would fail, which for a removable medium is more than a retry.
    fn luns_changed(&mut self, target: u8) {
        if self.events.hotplug() {
            return;
        }
        for (_, unit) in self.table.iter_mut() {
            if unit.address.target == target {
                unit.logical.luns_changed();
            }
        }
    }

    pub(super) fn index_of(&self, id: &str) -> Result<u32, ScsiError> {
        let unit_index = self.table.by_id(id);
        unit_index.ok_or_else(|| ScsiError::NotFound(id.to_owned()))
    }

    pub(super) fn remove(&mut self, id: &str, reply: ReplySender<Result<RemovedUnit, ScsiError>>) {
        let refuse = |reply: ReplySender<_>, error| drop(reply.send(Err(error)));
        let unit_index = match self.index_of(id) {
            Ok(unit_index) => unit_index,
            Err(error) => return refuse(reply, error),
        };
        let Some(unit) = self.table.unit_mut(unit_index) else {
            return refuse(reply, ScsiError::NotFound(id.to_owned()));
        };
        if unit.removal.is_some() {
            return refuse(reply, ScsiError::Removing(id.to_owned()));
        }
        unit.removal = Some(Removal::new(reply, self.config.removal_timeout));
        self.events.post(unit.address, UnitEvent::Removed);
        self.removing.push(unit_index);
        tracing::info!(disk = id, address = %unit.address, "removing");
    }

    /// Advances removals as far as possible.
    pub(super) fn poll_removals(&mut self) {
        self.reap_ejected();
        if self.removing.is_empty() {
            return;
        }
        let now = Instant::now();
        self.poll_event_buffers();
        for at in (0..self.removing.len()).rev() {
            let unit_index = self.removing[at];
            if self.removal_is_due(unit_index, now) {
                self.withdraw(unit_index);
            }
            self.finish_removal(unit_index);
        }
    }

    /// True if a unit that is being removed has been served long enough.
    fn removal_is_due(&self, unit_index: u32, now: Instant) -> bool {
        let Some(unit) = self.table.unit(unit_index) else {
            return false;
        };
        let Some(removal) = unit.removal.as_ref().filter(|r| r.stage == RemovalStage::Serving) else {
            return false;
        };
        let idle = unit.task_set.is_idle();
        if self.is_paused() {
            // A paused guest cannot write what it has to, nor get data from its disk.
            return idle && !unit.is_writable();
        }
        let cache = unit.is_writable() && unit.logical.write_cache();
        let done = idle && removal.is_done(cache, now);
        done || now >= removal.deadline || !self.events.hotplug()
    }

    /// Restarts the deadlines of removals after a pause, in which the driver could not act. The deadline of a disk that
    /// holds requests stays, or a disk that always fails could never be removed.
    pub(super) fn restart_removal_deadlines(&mut self) {
        let deadline = Instant::now() + self.config.removal_timeout;
        for unit_index in &self.removing {
            if let Some(unit) = self.table.unit_mut(*unit_index)
                && !unit.disk.is_some_and(|disk| self.held.contains(&disk))
                && let Some(removal) = &mut unit.removal
            {
                removal.deadline = deadline;
            }
        }
    }

    /// Removes a unit's address. Its running tasks end.
    fn withdraw(&mut self, unit_index: u32) {
        let Some(unit) = self.table.unit_mut(unit_index) else {
            return;
        };
        let (address, disk) = (unit.address, unit.disk);
        let Some(removal) = &mut unit.removal else { return };
        removal.stage = RemovalStage::Draining;
        let (event_buffer, over) = (removal.event_buffer, removal.buffer_returned || removal.flushed);
        self.table.withdraw(unit_index);
        if self.events.hotplug() && !over {
            self.unacknowledged.insert(address, event_buffer);
        }
        self.luns_changed(address.target);
        if let Some(disk) = disk {
            self.fail_requests(disk);
        }
        let tasks = self
            .slots
            .tasks()
            .filter(|(_, slot)| slot.unit_index == unit_index);
        let tags: Vec<u16> = tasks.map(|(tag, _)| tag).collect();
        self.engine.abandon_zeroing(&tags);
        for tag in tags {
            if self.cancel_query(tag) {
                self.finish(tag, &RequestOutcome::ResponseCode(ResponseCode::Failure));
            }
        }
    }

    /// Completes the removal of a unit without an address after its last task has ended.
    fn finish_removal(&mut self, unit_index: u32) {
        let Some(unit) = self.table.unit_mut(unit_index) else {
            return;
        };
        let flushes = unit.is_writable();
        let idle = unit.task_set.is_idle();
        let Some(removal) = unit
            .removal
            .as_mut()
            .filter(|r| r.stage == RemovalStage::Draining)
        else {
            return;
        };
        if !idle {
            return;
        }
        let Some(disk) = unit.disk.filter(|_| flushes) else {
            return self.complete_removal(unit_index, Ok(()));
        };
        // Without a free slot, the next slot that is freed triggers another pass.
        if let Some((tag, _)) = self.slots.take(SlotUse::Flush, unit_index) {
            removal.stage = RemovalStage::Flushing;
            // SAFETY: the tag is this slot's. A flush has no buffers.
            unsafe { self.engine.submit(tag, disk, IoRequest::Flush) };
        }
    }

    /// The last flush of a unit has ended.
    pub(super) fn flushed(&mut self, unit_index: u32, result: io::Result<()>) {
        self.complete_removal(unit_index, result);
    }

    fn complete_removal(&mut self, unit_index: u32, flushed: io::Result<()>) {
        self.removing.retain(|other| *other != unit_index);
        let Some(unit) = self.table.remove(unit_index) else {
            return;
        };
        let disk = unit.disk.and_then(|id| self.engine.disk(id).cloned());
        let detached = unit.disk.map_or(Ok(()), |id| self.engine.detach(id));
        if let Err(error) = &flushed {
            tracing::warn!(disk = unit.id, %error, "the last writes may be lost");
        }
        tracing::info!(disk = unit.id, address = %unit.address, "removed");
        let Unit {
            id, removal, workers, ..
        } = *unit;
        drop(workers);
        if let Some(removal) = removal {
            let removed = detached
                .map(|()| RemovedUnit { disk, flushed })
                .map_err(|error| ScsiError::Io(id, error));
            let _ = removal.reply.send(removed);
        }
    }

    /// Time until [`Controller::pass`] has something to do that no event announces.
    pub fn next_due(&self) -> Option<Duration> {
        if self.removing.is_empty() {
            return None;
        }
        let (now, paused) = (Instant::now(), self.is_paused());
        let units = self
            .removing
            .iter()
            .filter_map(|unit_index| self.table.unit(*unit_index));
        let due = units.filter_map(|unit| unit.removal.as_ref()?.due(now, paused));
        due.min()
    }

    pub(super) fn find(&self, id: &str) -> Result<Disk, ScsiError> {
        let unit = self.table.unit(self.index_of(id)?);
        let disk = unit
            .and_then(|unit| unit.disk)
            .and_then(|disk| self.engine.disk(disk));
        disk.cloned()
            .ok_or_else(|| ScsiError::Io(id.to_owned(), io::ErrorKind::NotFound.into()))
    }

    pub(super) fn resized(&mut self, id: &str) -> Result<u64, ScsiError> {
        let unit_index = self.index_of(id)?;
        let disk = self.find(id)?;
        let Some(unit) = self.table.unit_mut(unit_index) else {
            return Err(ScsiError::NotFound(id.to_owned()));
        };
        let medium = unit.logical.medium().copied();
        let Some(MediumLimits {
            block_size,
            blocks: old,
            ..
        }) = medium
        else {
            return Err(ScsiError::Medium(id.to_owned(), InvalidLimits::Blocks(0)));
        };
        let blocks = blocks(&disk, block_size);
        let resized = unit.logical.resize(blocks);
        resized.map_err(|bad| ScsiError::Medium(id.to_owned(), bad))?;
        if blocks != old {
            self.events.post(unit.address, UnitEvent::CapacityChanged);
            tracing::info!(disk = id, blocks, "resized");
        }
        Ok(blocks * u64::from(block_size))
    }

    pub(super) fn list(&self) -> Vec<UnitInfo> {
        let info = |unit: &Unit| UnitInfo {
            id: unit.id.clone(),
            address: unit.address,
            kind: unit.logical.kind(),
            bytes: unit.logical.medium().map(bytes).or(host_bytes(&unit.logical)),
            read_only: is_read_only(&unit.logical),
            removing: unit.removal.is_some(),
            counters: unit
                .disk
                .and_then(|disk| Some(self.engine.disk(disk)?.counters())),
        };
        let mut list: Vec<_> = self.table.iter().map(|(_, unit)| info(unit)).collect();
        list.sort_by_key(|info| info.address);
        list
    }
}

/// Size of a medium in bytes.
pub(super) fn bytes(limits: &MediumLimits) -> u64 {
    limits.blocks * u64::from(limits.block_size)
}

/// Size in bytes, as far as the device has reported it.
fn host_bytes(unit: &LogicalUnit) -> Option<u64> {
    let limits = unit.passthrough_limits()?;
    limits.blocks.checked_mul(limits.block_size.into())
}

fn is_read_only(unit: &LogicalUnit) -> bool {
    let host = unit.passthrough_limits().is_some_and(|limits| limits.read_only);
    unit.kind() == DeviceKind::CdRom || host || unit.medium().is_some_and(|limits| limits.read_only)
}
