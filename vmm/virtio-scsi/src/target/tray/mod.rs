//! The tray of a CD-ROM drive, moved by the host and by START STOP UNIT.

use super::logical_unit::{LogicalUnit, RemovalPrevented};
use super::properties::{DeviceKind, InvalidLimits, MediumLimits};
use super::sense::Sense;
use super::tray_state::MediaEvent;
use super::unit_attention::UnitAttention;

impl LogicalUnit {
    /// True if the tray is open.
    #[must_use]
    pub fn tray_open(&self) -> bool {
        self.tray.open
    }

    /// True if the initiator prevents the removal of the medium.
    #[must_use]
    pub fn removal_prevented(&self) -> bool {
        self.tray.prevented
    }

    /// Inserts a medium into a drive, replacing any other, and closes the tray. Ignores PREVENT ALLOW MEDIUM REMOVAL:
    /// to respect it, call [`LogicalUnit::eject`] first.
    ///
    /// # Errors
    /// The unit is not a drive, or the medium does not suit a drive.
    pub fn insert(&mut self, medium: MediumLimits) -> Result<(), InvalidLimits> {
        medium.check(DeviceKind::CdRom)?;
        if self.kind != DeviceKind::CdRom {
            return Err(InvalidLimits::BlockSize(medium.block_size));
        }
        self.medium = Some(medium);
        self.changes = self.changes.wrapping_add(1);
        self.close_tray();
        Ok(())
    }

    /// Opens the tray and removes the medium. Does nothing for a disk.
    ///
    /// # Errors
    /// The initiator prevents it and `force` is not set. The initiator gets an eject request event, so a retry may
    /// succeed.
    pub fn eject(&mut self, force: bool) -> Result<(), RemovalPrevented> {
        if self.kind != DeviceKind::CdRom {
            return Ok(());
        }
        if self.tray.prevented && !self.tray.open && !force {
            self.tray.event = Some(MediaEvent::EjectRequest);
            return Err(RemovalPrevented);
        }
        self.tray.prevented = false;
        self.open_tray();
        self.medium = None;
        Ok(())
    }

    /// Ejects on behalf of the initiator.
    pub(crate) fn unload(&mut self) -> Result<(), Sense> {
        if self.tray.prevented && !self.tray.open {
            return Err(Sense::REMOVAL_PREVENTED);
        }
        self.open_tray();
        Ok(())
    }

    fn open_tray(&mut self) {
        if !self.tray.open {
            self.tray.open = true;
            self.changes = self.changes.wrapping_add(1);
            self.tray.event = self.medium.is_some().then_some(MediaEvent::MediaRemoval);
        }
    }

    pub(crate) fn close_tray(&mut self) {
        self.tray.open = false;
        self.stopped = false;
        if self.medium.is_some() {
            self.tray.event = Some(MediaEvent::NewMedia);
            self.unit_attentions.establish(UnitAttention::MediumChanged);
        }
    }
}

#[cfg(test)]
mod tests;
