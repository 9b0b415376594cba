//! Logical units that come, change and go.

use std::io;
use std::time::{Duration, Instant};

use husk_disk::{Disk, IoRequest};

use super::Controller;
use crate::events::What;
use crate::handle::{Error, Info, Removed, Reply};
use crate::slots::Kind as Slot;
use crate::target::{BadLimits, Kind, Limits, LogicalUnit};
use crate::unit::{Medium, NewUnit, Removal, Stage, Unit, blocks};

impl Controller {
    pub fn add(&mut self, new: NewUnit) -> Result<(), Error> {
        let address = new.address;
        if address.target > self.rules.max_target {
            return Err(Error::Target(address.target, self.rules.max_target));
        }
        if let Some(unit) = self.table.by_id(&new.id).and_then(|place| self.table.unit(place)) {
            return if unit.removal.is_some() {
                Err(Error::Removing(new.id))
            } else if unit.address == address {
                Ok(())
            } else {
                Err(Error::Elsewhere(new.id, unit.address))
            };
        }
        let there = self.table.find(address).and_then(|place| self.table.unit(place));
        if let Some(unit) = there {
            return Err(Error::Occupied(address, unit.id.clone()));
        }
        self.look_for_buffers();
        if self.unreleased.contains_key(&address) {
            return Err(Error::NotReleased(address));
        }
        let mut unit = Unit::new(&new).map_err(|bad| Error::Medium(new.id.clone(), bad))?;
        if let Some(disk) = new.disk() {
            let attached = self.engine.attach(disk);
            unit.disk = Some(attached.map_err(|error| Error::Io(new.id.clone(), error))?);
        }
        if let Medium::Host(host) = &new.medium {
            let workers = self.passages.workers(host.device.clone());
            unit.workers = Some(workers.map_err(|error| Error::Io(new.id.clone(), error))?);
        }
        self.table.insert(unit);
        self.events.post(address, What::Added);
        self.luns_changed(address.target);
        tracing::info!(disk = new.id, %address, "added");
        Ok(())
    }

    /// Has a target's units tell that others came or went, where no event does. To a driver that has the event it would
    /// be an error of every unit's next command, which for a removable medium is more than an excuse to try again.
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

    pub(super) fn place_of(&self, id: &str) -> Result<u32, Error> {
        let place = self.table.by_id(id);
        place.ok_or_else(|| Error::NotFound(id.to_owned()))
    }

    pub(super) fn remove(&mut self, id: &str, reply: Reply<Result<Removed, Error>>) {
        let refuse = |reply: Reply<_>, error| drop(reply.send(Err(error)));
        let place = match self.place_of(id) {
            Ok(place) => place,
            Err(error) => return refuse(reply, error),
        };
        let Some(unit) = self.table.unit_mut(place) else {
            return refuse(reply, Error::NotFound(id.to_owned()));
        };
        if unit.removal.is_some() {
            return refuse(reply, Error::Removing(id.to_owned()));
        }
        unit.removal = Some(Removal::new(reply, self.rules.grace));
        self.events.post(unit.address, What::Removed);
        self.removing.push(place);
        tracing::info!(disk = id, address = %unit.address, "removal begins");
    }

    /// Goes on with removals as far as they get.
    pub(super) fn tend(&mut self) {
        self.tend_leaving();
        if self.removing.is_empty() {
            return;
        }
        let now = Instant::now();
        self.look_for_buffers();
        for at in (0..self.removing.len()).rev() {
            let place = self.removing[at];
            if self.is_over(place, now) {
                self.withdraw(place);
            }
            self.wind_up(place);
        }
    }

    /// Whether a unit that is removed has been there long enough.
    fn is_over(&self, place: u32, now: Instant) -> bool {
        let Some(unit) = self.table.unit(place) else {
            return false;
        };
        let Some(removal) = unit.removal.as_ref().filter(|r| r.stage == Stage::Serving) else {
            return false;
        };
        let idle = unit.order.is_idle();
        if self.is_paused() {
            // A guest that stands still cannot write what it has to, nor be answered what its disk holds.
            return idle && !unit.is_writable();
        }
        let cache = unit.is_writable() && unit.logical.write_cache();
        let done = idle && removal.is_done(cache, now);
        done || now >= removal.deadline || !self.events.hotplug()
    }

    /// The driver goes on after a pause, which was no time for it to act in. But the time of a disk that holds requests is
    /// over when it is over, else a disk that fails for ever could never be removed.
    pub(super) fn go_on_with_removals(&mut self) {
        let deadline = Instant::now() + self.rules.grace;
        for place in &self.removing {
            if let Some(unit) = self.table.unit_mut(*place)
                && !unit.disk.is_some_and(|disk| self.held.contains(&disk))
                && let Some(removal) = &mut unit.removal
            {
                removal.deadline = deadline;
            }
        }
    }

    /// Takes a unit's address away; what it still has to do comes to an end.
    fn withdraw(&mut self, place: u32) {
        let Some(unit) = self.table.unit_mut(place) else {
            return;
        };
        let (address, disk) = (unit.address, unit.disk);
        let Some(removal) = &mut unit.removal else { return };
        removal.stage = Stage::Draining;
        let (told, over) = (removal.told, removal.released || removal.flushed);
        self.table.withdraw(place);
        if self.events.hotplug() && !over {
            self.unreleased.insert(address, told);
        }
        self.luns_changed(address.target);
        if let Some(disk) = disk {
            self.give_up(disk);
        }
    }

    /// Ends the removal of a unit without an address, when its last tasks have ended.
    fn wind_up(&mut self, place: u32) {
        let Some(unit) = self.table.unit_mut(place) else {
            return;
        };
        let flushes = unit.is_writable();
        let idle = unit.order.is_idle();
        let Some(removal) = unit.removal.as_mut().filter(|r| r.stage == Stage::Draining) else {
            return;
        };
        if !idle {
            return;
        }
        let Some(disk) = unit.disk.filter(|_| flushes) else {
            return self.end_removal(place, Ok(()));
        };
        // If there is no slot now, one that is freed brings us back.
        if let Some((tag, _)) = self.slots.take(Slot::Flush, place) {
            removal.stage = Stage::Flushing;
            // SAFETY: the tag is this slot's. A flush has no buffers.
            unsafe { self.engine.submit(tag, disk, IoRequest::Flush) };
        }
    }

    /// The last flush of a unit has ended.
    pub(super) fn flushed(&mut self, place: u32, result: io::Result<()>) {
        self.end_removal(place, result);
    }

    fn end_removal(&mut self, place: u32, flushed: io::Result<()>) {
        self.removing.retain(|other| *other != place);
        let Some(unit) = self.table.remove(place) else {
            return;
        };
        let disk = unit.disk.and_then(|id| self.engine.disk(id).cloned());
        let detached = unit.disk.map_or(Ok(()), |id| self.engine.detach(id));
        if let Err(error) = &flushed {
            tracing::warn!(disk = unit.id, %error, "what was written last may be lost");
        }
        tracing::info!(disk = unit.id, address = %unit.address, "removed");
        let Unit {
            id, removal, workers, ..
        } = *unit;
        drop(workers);
        if let Some(removal) = removal {
            let removed = detached
                .map(|()| Removed { disk, flushed })
                .map_err(|error| Error::Io(id, error));
            let _ = removal.reply.send(removed);
        }
    }

    /// When [`Controller::pass`] has something to do that nothing else calls for.
    pub fn next_due(&self) -> Option<Duration> {
        if self.removing.is_empty() {
            return None;
        }
        let now = Instant::now();
        let units = self.removing.iter().filter_map(|place| self.table.unit(*place));
        let due = units.filter_map(|unit| unit.removal.as_ref()?.due(now));
        due.min()
    }

    pub(super) fn find(&self, id: &str) -> Result<Disk, Error> {
        let unit = self.table.unit(self.place_of(id)?);
        let disk = unit
            .and_then(|unit| unit.disk)
            .and_then(|disk| self.engine.disk(disk));
        disk.cloned()
            .ok_or_else(|| Error::Io(id.to_owned(), io::ErrorKind::NotFound.into()))
    }

    pub(super) fn resized(&mut self, id: &str) -> Result<u64, Error> {
        let place = self.place_of(id)?;
        let disk = self.find(id)?;
        let Some(unit) = self.table.unit_mut(place) else {
            return Err(Error::NotFound(id.to_owned()));
        };
        let medium = unit.logical.medium().copied();
        let Some(Limits {
            block_size,
            blocks: old,
            ..
        }) = medium
        else {
            return Err(Error::Medium(id.to_owned(), BadLimits::Blocks(0)));
        };
        let blocks = blocks(&disk, block_size);
        let resized = unit.logical.resize(blocks);
        resized.map_err(|bad| Error::Medium(id.to_owned(), bad))?;
        if blocks != old {
            self.events.post(unit.address, What::CapacityChanged);
            tracing::info!(disk = id, blocks, "resized");
        }
        Ok(blocks * u64::from(block_size))
    }

    pub(super) fn list(&self) -> Vec<Info> {
        let info = |unit: &Unit| Info {
            id: unit.id.clone(),
            address: unit.address,
            kind: unit.logical.kind(),
            bytes: unit.logical.medium().map(bytes).or(host_bytes(&unit.logical)),
            read_only: is_read_only(&unit.logical),
            removing: unit.removal.is_some(),
        };
        let mut list: Vec<_> = self.table.iter().map(|(_, unit)| info(unit)).collect();
        list.sort_by_key(|info| info.address);
        list
    }
}

fn bytes(limits: &Limits) -> u64 {
    limits.blocks * u64::from(limits.block_size)
}

/// As far as the device has told.
fn host_bytes(unit: &LogicalUnit) -> Option<u64> {
    let limits = unit.host_limits()?;
    limits.blocks.checked_mul(limits.block_size.into())
}

fn is_read_only(unit: &LogicalUnit) -> bool {
    let host = unit.host_limits().is_some_and(|limits| limits.read_only);
    unit.kind() == Kind::CdRom || host || unit.medium().is_some_and(|limits| limits.read_only)
}
