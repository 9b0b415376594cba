//! The state of a logical unit and its changes by the host.

use super::mode_parameters::Modes;
use super::passthrough_device::PassthroughLimits;
use super::properties::{DeviceKind, Identity, InvalidLimits, MediumLimits};
use super::reservation_state::ReservationState;
use super::sense::Sense;
use super::tray_state::Tray;
use super::unit_attention::{UnitAttention, UnitAttentionQueue};

/// One logical unit.
#[derive(Debug)]
pub struct LogicalUnit {
    pub(crate) kind: DeviceKind,
    pub(crate) identity: Identity,
    /// `None` only in a CD-ROM drive.
    pub(crate) medium: Option<MediumLimits>,
    /// Incremented when the medium is replaced or removed.
    pub(crate) changes: u32,
    pub(crate) unit_attentions: UnitAttentionQueue,
    pub(crate) modes: Modes,
    pub(crate) reservations: ReservationState,
    /// The initiator stopped the unit (START STOP UNIT).
    pub(crate) stopped: bool,
    pub(crate) tray: Tray,
    /// Limits of the passthrough device, if it is one.
    pub(crate) passthrough: Option<PassthroughLimits>,
}

/// Error of [`LogicalUnit::eject`]: the initiator prevents the removal of the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest prevents removal of the medium")]
pub struct RemovalPrevented;

impl LogicalUnit {
    /// A disk after power on.
    ///
    /// # Errors
    /// `limits` do not suit a disk.
    pub fn disk(identity: Identity, limits: MediumLimits) -> Result<Self, InvalidLimits> {
        limits.check(DeviceKind::Disk)?;
        Ok(Self::new(DeviceKind::Disk, identity, Some(limits)))
    }

    /// A closed CD-ROM drive after power on, with `medium` (see [`MediumLimits::cd`]) or empty.
    ///
    /// # Errors
    /// `medium` does not suit a drive.
    pub fn cdrom(identity: Identity, medium: Option<MediumLimits>) -> Result<Self, InvalidLimits> {
        if let Some(limits) = &medium {
            limits.check(DeviceKind::CdRom)?;
        }
        Ok(Self::new(DeviceKind::CdRom, identity, medium))
    }

    /// A passthrough device after power on.
    #[must_use]
    pub fn passthrough(identity: Identity, limits: PassthroughLimits) -> Self {
        Self {
            passthrough: Some(limits),
            ..Self::new(DeviceKind::Passthrough, identity, None)
        }
    }

    fn new(kind: DeviceKind, identity: Identity, medium: Option<MediumLimits>) -> Self {
        let mut unit = Self {
            kind,
            identity,
            medium,
            changes: 0,
            unit_attentions: UnitAttentionQueue::default(),
            modes: Modes::new(medium.as_ref()),
            reservations: ReservationState::default(),
            stopped: false,
            tray: Tray::default(),
            passthrough: None,
        };
        unit.unit_attentions.establish(UnitAttention::PowerOn);
        unit
    }

    /// The medium, if it is ready.
    pub(crate) fn ready(&self) -> Result<&MediumLimits, Sense> {
        if self.tray.open {
            return Err(Sense::TRAY_OPEN);
        }
        let limits = self.medium.as_ref().ok_or(Sense::NO_MEDIUM)?;
        if self.stopped {
            return Err(Sense::STOPPED);
        }
        Ok(limits)
    }

    /// Kind of device.
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Names of the unit.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The medium in it, even if the tray is open.
    #[must_use]
    pub fn medium(&self) -> Option<&MediumLimits> {
        self.medium.as_ref()
    }

    /// Limits of a passthrough device.
    #[must_use]
    pub fn passthrough_limits(&self) -> Option<&PassthroughLimits> {
        self.passthrough.as_ref()
    }

    /// True if completed writes may be in a volatile cache: there is one, and WCE is set.
    #[must_use]
    pub fn write_cache(&self) -> bool {
        self.modes.write_cache
    }

    /// Resets the unit. `attention` is the cause: power on, target or unit reset, or loss of the I_T nexus. All but
    /// reservations, tray and medium returns to the state after power on. A power on also clears reservations and
    /// closes the tray. The owner aborts the tasks.
    pub fn reset(&mut self, attention: UnitAttention) {
        self.unit_attentions.establish(attention);
        self.tray.prevented = false;
        if attention == UnitAttention::NexusLoss {
            return;
        }
        if attention == UnitAttention::PowerOn {
            self.reservations = ReservationState::default();
            self.tray = Tray::default();
        }
        self.modes = Modes::new(self.medium.as_ref());
        self.stopped = false;
    }

    /// Establishes a unit attention condition.
    pub fn establish_unit_attention(&mut self, attention: UnitAttention) {
        self.unit_attentions.establish(attention);
    }

    /// Establishes REPORTED LUNS DATA HAS CHANGED.
    pub fn luns_changed(&mut self) {
        self.unit_attentions.establish(UnitAttention::LunsChanged);
    }

    /// Clears REPORTED LUNS DATA HAS CHANGED, after another unit of the target answered REPORT LUNS
    /// ([`Task::reports_luns`]).
    pub fn luns_reported(&mut self) {
        self.unit_attentions.clear(UnitAttention::LunsChanged);
    }

    /// Sets the size of the medium. Running tasks start no steps behind the new end.
    ///
    /// # Errors
    /// The size is not supported.
    pub fn resize(&mut self, blocks: u64) -> Result<(), InvalidLimits> {
        let kind = self.kind;
        let Some(limits) = &mut self.medium else {
            return Err(InvalidLimits::Blocks(blocks));
        };
        let resized = MediumLimits { blocks, ..*limits };
        resized.check(kind)?;
        if resized != *limits {
            *limits = resized;
            self.unit_attentions.establish(UnitAttention::CapacityChanged);
        }
        Ok(())
    }
}
