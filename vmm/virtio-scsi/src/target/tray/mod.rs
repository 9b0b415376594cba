//! The tray of a CD-ROM drive, from the host's side and as the START STOP UNIT command moves it.

use super::logical_unit::{LogicalUnit, RemovalPrevented};
use super::properties::{DeviceKind, InvalidLimits, MediumLimits};
use super::sense::Sense;
use super::unit_attention::UnitAttention;

/// Where the tray is and what the initiator has not heard of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tray {
    pub open: bool,
    /// PREVENT ALLOW MEDIUM REMOVAL forbids to open it.
    pub prevented: bool,
    /// For GET EVENT STATUS NOTIFICATION (MMC-6, media events).
    pub event: Option<MediaEvent>,
}

/// Media events, oldest of which is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum MediaEvent {
    EjectRequest = 1,
    NewMedia = 2,
    MediaRemoval = 3,
}

impl LogicalUnit {
    /// Whether the tray is open.
    #[must_use]
    pub fn tray_open(&self) -> bool {
        self.tray.open
    }

    /// Whether the initiator prevents removal of the medium.
    #[must_use]
    pub fn removal_prevented(&self) -> bool {
        self.tray.prevented
    }

    /// Puts a medium into a drive in place of any other, and closes the tray. Who minds whether the initiator prevents
    /// that ejects first.
    ///
    /// # Errors
    /// The unit is no drive, or the medium is none for it.
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

    /// Opens the tray and takes the medium out. A disk has none to take: nothing happens.
    ///
    /// # Errors
    /// The initiator prevents it and `force` is not set. It is asked to allow it (an eject request event), so it is
    /// worth trying again.
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

    /// The initiator's eject.
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
