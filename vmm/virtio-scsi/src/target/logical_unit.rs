//! A logical unit's state, and what happens to it from outside.

use super::cdb::Cdb;
use super::command_table::{self, CommandDescriptor};
use super::mode_pages::Modes;
use super::passthrough::{self, PassthroughLimits};
use super::properties::{DeviceKind, Identity, InvalidLimits, MediumLimits};
use super::reservation_state::ReservationState;
use super::sense::Sense;
use super::step::ScsiCommand;
use super::task::{CommandError, Task, Work};
use super::tray::Tray;
use super::unit_attention::{UnitAttention, UnitAttentionQueue};

/// One logical unit.
#[derive(Debug)]
pub struct LogicalUnit {
    pub(crate) kind: DeviceKind,
    pub(crate) identity: Identity,
    /// None only in a drive.
    pub(crate) medium: Option<MediumLimits>,
    /// Goes up whenever the medium does not hold any more what it held.
    pub(crate) changes: u32,
    pub(crate) unit_attentions: UnitAttentionQueue,
    pub(crate) modes: Modes,
    pub(crate) reservations: ReservationState,
    /// The initiator stopped the unit (START STOP UNIT).
    pub(crate) stopped: bool,
    pub(crate) tray: Tray,
    /// It is a device of the host, and what it is used for.
    pub(crate) passthrough: Option<PassthroughLimits>,
}

/// The medium stays where it is: the initiator prevents its removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest prevents removal of the medium")]
pub struct RemovalPrevented;

impl LogicalUnit {
    /// A disk that has just been powered on.
    ///
    /// # Errors
    /// `limits` are none of a disk.
    pub fn disk(identity: Identity, limits: MediumLimits) -> Result<Self, InvalidLimits> {
        limits.check(DeviceKind::Disk)?;
        Ok(Self::new(DeviceKind::Disk, identity, Some(limits)))
    }

    /// A CD-ROM drive that has just been powered on, closed, with `medium` in it (see [`MediumLimits::cd`]) or nothing.
    ///
    /// # Errors
    /// `medium` is none for a drive.
    pub fn cdrom(identity: Identity, medium: Option<MediumLimits>) -> Result<Self, InvalidLimits> {
        if let Some(limits) = &medium {
            limits.check(DeviceKind::CdRom)?;
        }
        Ok(Self::new(DeviceKind::CdRom, identity, medium))
    }

    /// A device of the host, to which commands are passed on.
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

    /// Takes a command on. It may be done already, which [`Task::next`] tells; what it changes in this unit's state
    /// without any I/O is changed here.
    pub fn begin(&mut self, command: ScsiCommand<'_>) -> Task {
        if let Some(limits) = self.passthrough {
            return passthrough::begin(self, limits, command);
        }
        let op = command_table::find(self, command.cdb);
        let work = self.admit(op, &command);
        Task::of(self, op, work, &command)
    }

    pub(crate) fn admit(
        &mut self,
        op: Result<&'static CommandDescriptor, Sense>,
        command: &ScsiCommand<'_>,
    ) -> Result<Work, CommandError> {
        if !op.is_ok_and(|op| op.ignores_unit_attention)
            && let Some(attention) = self.unit_attentions.take()
        {
            return Err(attention.sense().into());
        }
        let op = op?;
        let cdb = Cdb::new(command.cdb, op)?;
        if op.needs_medium {
            let limits = self.ready()?;
            if op.writes && limits.read_only {
                return Err(Sense::WRITE_PROTECTED.into());
            }
        }
        (op.serve)(self, &cdb, command)
    }

    /// The medium, if it can be accessed.
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

    /// What kind of device it is.
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Its names.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The medium in it, whether or not the tray is open.
    #[must_use]
    pub fn medium(&self) -> Option<&MediumLimits> {
        self.medium.as_ref()
    }

    /// What the device of the host is that it is, if it is one.
    #[must_use]
    pub fn passthrough_limits(&self) -> Option<&PassthroughLimits> {
        self.passthrough.as_ref()
    }

    /// Whether completed writes may be in a volatile cache: there is one, and the initiator has not switched it off.
    #[must_use]
    pub fn write_cache(&self) -> bool {
        self.modes.write_cache
    }

    /// A reset of the unit (`attention` tells which: power on, target or unit reset, or loss of the nexus), which
    /// brings all but reservations, tray and medium into the state of a unit just powered on. A power on ends
    /// reservations and closes the tray too. Tasks are the owner's to abort.
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

    /// Tells the initiator of something the unit's owner knows of.
    pub fn establish_unit_attention(&mut self, attention: UnitAttention) {
        self.unit_attentions.establish(attention);
    }

    /// Other logical units came or went.
    pub fn luns_changed(&mut self) {
        self.unit_attentions.establish(UnitAttention::LunsChanged);
    }

    /// Another unit of this target has answered REPORT LUNS ([`Task::reports_luns`]), so that the initiator knows.
    pub fn luns_reported(&mut self) {
        self.unit_attentions.clear(UnitAttention::LunsChanged);
    }

    /// The medium has `blocks` blocks now. Steps beyond them are not asked for any more.
    ///
    /// # Errors
    /// There cannot be so many.
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
