//! Inserts and ejects discs of CD-ROM drives.

use husk_disk::{Disk, DiskId};

use super::Controller;
use crate::handle::{ReplySender, ScsiError};
use crate::pending_events::UnitEvent;
use crate::target::DeviceKind;
use crate::unit::disc_limits;

/// A disc that was taken out of its drive while it is still being read.
#[derive(Debug)]
pub(super) struct EjectedDisc {
    pub disc: DiskId,
    reply: Option<ReplySender<Result<Option<Disk>, ScsiError>>>,
}

impl Controller {
    pub(super) fn insert(&mut self, id: &str, disc: &Disk) -> Result<(), ScsiError> {
        let unit_index = self.drive_of(id)?;
        let attached = self.engine.attach(disc);
        let attached = attached.map_err(|error| ScsiError::Io(id.to_owned(), error))?;
        let Some(unit) = self.table.unit_mut(unit_index) else {
            return Err(ScsiError::NotFound(id.to_owned()));
        };
        if let Err(bad) = unit.logical.insert(disc_limits(disc)) {
            let _ = self.engine.detach(attached);
            return Err(ScsiError::Medium(id.to_owned(), bad));
        }
        if let Some(disc) = unit.disk.replace(attached) {
            self.ejected.push(EjectedDisc { disc, reply: None });
        }
        self.media_changed(unit_index);
        Ok(())
    }

    pub(super) fn eject(
        &mut self,
        id: &str,
        force: bool,
        reply: ReplySender<Result<Option<Disk>, ScsiError>>,
    ) {
        let ejected = self.drive_of(id).and_then(|unit_index| {
            let unit = self.table.unit_mut(unit_index);
            let unit = unit.ok_or_else(|| ScsiError::NotFound(id.to_owned()))?;
            let ejected = unit.logical.eject(force);
            ejected.map_err(|_| ScsiError::Prevented(id.to_owned()))?;
            Ok((unit_index, unit.disk.take()))
        });
        match ejected {
            Ok((unit_index, Some(disc))) => {
                let reply = Some(reply);
                self.ejected.push(EjectedDisc { disc, reply });
                self.media_changed(unit_index);
            }
            Ok((_, None)) => drop(reply.send(Ok(None))),
            Err(error) => drop(reply.send(Err(error))),
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
            if let Some(reply) = reply {
                let _ = reply.send(Ok(disc));
            }
        }
    }
}
