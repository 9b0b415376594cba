//! Discs that are put into drives and taken out.

use husk_disk::{Disk, DiskId};

use super::Controller;
use crate::events::What;
use crate::handle::{Error, Reply};
use crate::target::Kind;
use crate::unit::disc_limits;

/// A disc that is no longer in its drive and whose last reads are under way.
#[derive(Debug)]
pub(super) struct Leaving {
    pub disc: DiskId,
    reply: Option<Reply<Result<Option<Disk>, Error>>>,
}

impl Controller {
    pub(super) fn insert(&mut self, id: &str, disc: &Disk) -> Result<(), Error> {
        let place = self.drive_of(id)?;
        let attached = self.engine.attach(disc);
        let attached = attached.map_err(|error| Error::Io(id.to_owned(), error))?;
        let Some(unit) = self.table.unit_mut(place) else {
            return Err(Error::NotFound(id.to_owned()));
        };
        if let Err(bad) = unit.logical.insert(disc_limits(disc)) {
            let _ = self.engine.detach(attached);
            return Err(Error::Medium(id.to_owned(), bad));
        }
        if let Some(disc) = unit.disk.replace(attached) {
            self.leaving.push(Leaving { disc, reply: None });
        }
        self.media_changed(place);
        Ok(())
    }

    pub(super) fn eject(&mut self, id: &str, force: bool, reply: Reply<Result<Option<Disk>, Error>>) {
        let ejected = self.drive_of(id).and_then(|place| {
            let unit = self.table.unit_mut(place);
            let unit = unit.ok_or_else(|| Error::NotFound(id.to_owned()))?;
            let ejected = unit.logical.eject(force);
            ejected.map_err(|_| Error::Prevented(id.to_owned()))?;
            Ok((place, unit.disk.take()))
        });
        match ejected {
            Ok((place, Some(disc))) => {
                let reply = Some(reply);
                self.leaving.push(Leaving { disc, reply });
                self.media_changed(place);
            }
            Ok((_, None)) => drop(reply.send(Ok(None))),
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    /// The place of a drive that is to stay.
    fn drive_of(&self, id: &str) -> Result<u32, Error> {
        let place = self.place_of(id)?;
        match self.table.unit(place) {
            Some(unit) if unit.removal.is_some() => Err(Error::Removing(id.to_owned())),
            Some(unit) if unit.logical.kind() == Kind::CdRom => Ok(place),
            _ => Err(Error::NotADrive(id.to_owned())),
        }
    }

    fn media_changed(&mut self, place: u32) {
        if let Some(unit) = self.table.unit(place)
            && unit.media_events
        {
            self.events.post(unit.address, What::MediaChanged);
        }
    }

    /// Lets go of discs that nobody reads any more.
    pub(super) fn tend_leaving(&mut self) {
        for at in (0..self.leaving.len()).rev() {
            let id = self.leaving[at].disc;
            if !self.is_paused() {
                self.give_up(id);
            }
            if self.engine.in_flight(id) > 0 {
                continue;
            }
            let disc = self.engine.disk(id).cloned();
            let Leaving { reply, .. } = self.leaving.swap_remove(at);
            if let Err(error) = self.engine.detach(id) {
                tracing::warn!(%error, "a disc stays open");
            }
            if let Some(reply) = reply {
                let _ = reply.send(Ok(disc));
            }
        }
    }
}
