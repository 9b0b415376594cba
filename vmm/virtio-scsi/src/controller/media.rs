//! Inserts and ejects discs of CD-ROM drives.

use husk_disk::{Disk, DiskId};

use super::Controller;
use super::hotplug::bytes;
use crate::handle::{ReplySender, ScsiError};
use crate::pending_events::UnitEvent;
use crate::target::DeviceKind;
use crate::unit::disc_limits;

/// A disc that was taken out of its drive while it is still being read.
#[derive(Debug)]
pub(super) struct EjectedDisc {
    pub disc: DiskId,
    reply: ReplySender<Result<Option<Disk>, ScsiError>>,
}

impl Controller {
    pub(super) fn insert(&mut self, id: &str, disc: &Disk) -> Result<u64, ScsiError> {
        let unit_index = self.drive_of(id)?;
        if self
            .table
            .unit(unit_index)
            .is_some_and(|unit| unit.disk.is_some())
        {
            return Err(ScsiError::Loaded(id.to_owned()));
        }
        let attached = self.engine.attach(disc);
        let attached = attached.map_err(|error| ScsiError::Io(id.to_owned(), error))?;
        let Some(unit) = self.table.unit_mut(unit_index) else {
            return Err(ScsiError::NotFound(id.to_owned()));
        };
        let limits = disc_limits(disc);
        if let Err(bad) = unit.logical.insert(limits) {
            let _ = self.engine.detach(attached);
            return Err(ScsiError::Medium(id.to_owned(), bad));
        }
        unit.disk = Some(attached);
        self.media_changed(unit_index);
        tracing::info!(disk = id, "disc inserted");
        Ok(bytes(&limits))
    }

    pub(super) fn eject(
        &mut self,
        id: &str,
        force: bool,
        reply: ReplySender<Result<Option<Disk>, ScsiError>>,
    ) {
        match self.take_disc(id, force) {
            Ok(Some(disc)) => {
                self.ejected.push(EjectedDisc { disc, reply });
                tracing::info!(disk = id, "disc ejected");
            }
            Ok(None) => drop(reply.send(Ok(None))),
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    /// Opens the tray of a drive and takes its disc out, if there is one.
    fn take_disc(&mut self, id: &str, force: bool) -> Result<Option<DiskId>, ScsiError> {
        let unit_index = self.drive_of(id)?;
        let unit = self.table.unit_mut(unit_index);
        let unit = unit.ok_or_else(|| ScsiError::NotFound(id.to_owned()))?;
        if unit.disk.is_none() {
            return Ok(None);
        }
        let prevented = unit.logical.eject(force).is_err();
        let disc = unit.disk.take_if(|_| !prevented);
        // The driver then asks the drive what has changed: the disc is gone, or the guest is to eject it.
        self.media_changed(unit_index);
        match prevented {
            true => Err(ScsiError::Prevented(id.to_owned())),
            false => Ok(disc),
        }
    }

    /// The index of a CD-ROM drive that is not being removed.
    fn drive_of(&self, id: &str) -> Result<u32, ScsiError> {
        let unit_index = self.index_of(id)?;
        match self.table.unit(unit_index) {
            Some(unit) if unit.removal.is_some() => Err(ScsiError::Removing(id.to_owned())),
            Some(unit) if unit.logical.kind() == DeviceKind::CdRom => Ok(unit_index),
            _ => Err(ScsiError::NotADrive(id.to_owned())),
        }
    }

    fn media_changed(&mut self, unit_index: u32) {
        if let Some(unit) = self.table.unit(unit_index)
            && unit.media_events
        {
            self.events.post(unit.address, UnitEvent::MediaChanged);
        }
    }

    /// Detaches ejected discs that have no reads in flight.
    pub(super) fn reap_ejected(&mut self) {
        for at in (0..self.ejected.len()).rev() {
            let id = self.ejected[at].disc;
            if !self.is_paused() {
                self.fail_requests(id);
            }
            if self.engine.in_flight(id) > 0 {
                continue;
            }
            let disc = self.engine.disk(id).cloned();
            let EjectedDisc { reply, .. } = self.ejected.swap_remove(at);
            if let Err(error) = self.engine.detach(id) {
                tracing::warn!(%error, "cannot close an ejected disc");
            }
            let _ = reply.send(Ok(disc));
        }
    }
}
