//! A logical unit's state, and what happens to it from outside.

use super::attention::{Attention, Attentions};
use super::cdb::Cdb;
use super::host::{self, HostLimits};
use super::limits::{BadLimits, Identity, Kind, Limits};
use super::mode::Modes;
use super::opcode::{self, Op};
use super::reservation::Reservations;
use super::sense::Sense;
use super::step::Command;
use super::task::{Fault, Task, Work};
use super::tray::Tray;

/// One logical unit.
#[derive(Debug)]
pub struct LogicalUnit {
    pub(crate) kind: Kind,
    pub(crate) identity: Identity,
    /// None only in a drive.
    pub(crate) medium: Option<Limits>,
    /// Goes up whenever the medium does not hold any more what it held.
    pub(crate) changes: u32,
    pub(crate) attentions: Attentions,
    pub(crate) modes: Modes,
    pub(crate) reservations: Reservations,
    /// The initiator stopped the unit (START STOP UNIT).
    pub(crate) stopped: bool,
    pub(crate) tray: Tray,
    /// It is a device of the host, and what it is used for.
    pub(crate) host: Option<HostLimits>,
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
    pub fn disk(identity: Identity, limits: Limits) -> Result<Self, BadLimits> {
        limits.check(Kind::Disk)?;
        Ok(Self::new(Kind::Disk, identity, Some(limits)))
    }

    /// A CD-ROM drive that has just been powered on, closed, with `medium` in it (see [`Limits::cd`]) or nothing.
    ///
    /// # Errors
    /// `medium` is none for a drive.
    pub fn cdrom(identity: Identity, medium: Option<Limits>) -> Result<Self, BadLimits> {
        if let Some(limits) = &medium {
            limits.check(Kind::CdRom)?;
        }
        Ok(Self::new(Kind::CdRom, identity, medium))
    }

    /// A device of the host, to which commands are passed on.
    #[must_use]
    pub fn host(identity: Identity, limits: HostLimits) -> Self {
        Self {
            host: Some(limits),
            ..Self::new(Kind::Host, identity, None)
        }
    }

    fn new(kind: Kind, identity: Identity, medium: Option<Limits>) -> Self {
        let mut unit = Self {
            kind,
            identity,
            medium,
            changes: 0,
            attentions: Attentions::default(),
            modes: Modes::new(medium.as_ref()),
            reservations: Reservations::default(),
            stopped: false,
            tray: Tray::default(),
            host: None,
        };
        unit.attentions.establish(Attention::PowerOn);
        unit
    }

    /// Takes a command on. It may be done already, which [`Task::next`] tells; what it changes in this unit's state
    /// without any I/O is changed here.
    pub fn begin(&mut self, command: Command<'_>) -> Task {
        if let Some(limits) = self.host {
            return host::begin(self, limits, command);
        }
        let op = opcode::find(self, command.cdb);
        let work = self.admit(op, &command);
        Task::of(self, op, work, &command)
    }

    pub(crate) fn admit(
        &mut self,
        op: Result<&'static Op, Sense>,
        command: &Command<'_>,
    ) -> Result<Work, Fault> {
        if !op.is_ok_and(|op| op.despite_attention)
            && let Some(attention) = self.attentions.take()
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
    pub(crate) fn ready(&self) -> Result<&Limits, Sense> {
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
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its names.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The medium in it, whether or not the tray is open.
    #[must_use]
    pub fn medium(&self) -> Option<&Limits> {
        self.medium.as_ref()
    }

    /// What the device of the host is that it is, if it is one.
    #[must_use]
    pub fn host_limits(&self) -> Option<&HostLimits> {
        self.host.as_ref()
    }

    /// Whether completed writes may be in a volatile cache: there is one, and the initiator has not switched it off.
    #[must_use]
    pub fn write_cache(&self) -> bool {
        self.modes.write_cache
    }

    /// A reset of the unit (`attention` tells which: power on, target or unit reset, or loss of the nexus), which
    /// brings all but reservations, tray and medium into the state of a unit just powered on. A power on ends
    /// reservations and closes the tray too. Tasks are the owner's to abort.
    pub fn reset(&mut self, attention: Attention) {
        self.attentions.establish(attention);
        self.tray.prevented = false;
        if attention == Attention::NexusLoss {
            return;
        }
        if attention == Attention::PowerOn {
            self.reservations = Reservations::default();
            self.tray = Tray::default();
        }
        self.modes = Modes::new(self.medium.as_ref());
        self.stopped = false;
    }

    /// Tells the initiator of something the unit's owner knows of.
    pub fn attend(&mut self, attention: Attention) {
        self.attentions.establish(attention);
    }

    /// Other logical units came or went.
    pub fn luns_changed(&mut self) {
        self.attentions.establish(Attention::LunsChanged);
    }

    /// Another unit of this target has answered REPORT LUNS ([`Task::reports_luns`]), so that the initiator knows.
    pub fn luns_reported(&mut self) {
        self.attentions.clear(Attention::LunsChanged);
    }

    /// The medium has `blocks` blocks now. Steps beyond them are not asked for any more.
    ///
    /// # Errors
    /// There cannot be so many.
    pub fn resize(&mut self, blocks: u64) -> Result<(), BadLimits> {
        let kind = self.kind;
        let Some(limits) = &mut self.medium else {
            return Err(BadLimits::Blocks(blocks));
        };
        let resized = Limits { blocks, ..*limits };
        resized.check(kind)?;
        if resized != *limits {
            *limits = resized;
            self.attentions.establish(Attention::CapacityChanged);
        }
        Ok(())
    }
}
