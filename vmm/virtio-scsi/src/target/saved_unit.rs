//! The state of a logical unit across a snapshot, without its medium.

use serde::{Deserialize, Serialize};

use super::logical_unit::LogicalUnit;
use super::mode_parameters::Modes;
use super::properties::{DeviceKind, MediumLimits};
use super::reservation_state::ReservationState;
use super::tray_state::Tray;
use super::unit_attention::{UnitAttention, UnitAttentionQueue};

/// The state of a disk or a drive.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedUnit {
    /// True for a CD-ROM drive.
    cdrom: bool,
    serial: Option<String>,
    /// The medium; none in an empty drive.
    medium: Option<SavedMedium>,
    /// Unit attention conditions, oldest first.
    unit_attentions: Vec<UnitAttention>,
    modes: Modes,
    reservations: ReservationState,
    /// The initiator stopped the unit.
    stopped: bool,
    tray: Tray,
}

/// The properties of a medium that requests in flight depend on.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedMedium {
    /// Bytes of a logical block.
    block_size: u32,
    blocks: u64,
    read_only: bool,
    /// There is a volatile cache, which the initiator may switch off.
    write_cache: bool,
}

impl SavedMedium {
    fn of(limits: &MediumLimits) -> Self {
        Self {
            block_size: limits.block_size,
            blocks: limits.blocks,
            read_only: limits.read_only,
            write_cache: limits.write_cache,
        }
    }

    /// True if a unit with the medium `own` can go on with this one. A disk's image may have grown since, and have the
    /// other kind of cache.
    fn fits(&self, own: &MediumLimits, kind: DeviceKind) -> bool {
        let mut own = Self::of(own);
        if kind == DeviceKind::Disk {
            own.blocks = own.blocks.min(self.blocks);
            own.write_cache = self.write_cache;
        }
        *self == own
    }
}

/// The reason for which a saved unit does not fit: the property that differs, or that it cannot have.
type UnitMismatch = &'static str;

impl SavedUnit {
    /// The state of a unit; `None` of a passthrough device, which has state of its own.
    pub fn of(unit: &LogicalUnit) -> Option<Self> {
        if unit.kind == DeviceKind::Passthrough {
            return None;
        }
        Some(Self {
            cdrom: unit.kind == DeviceKind::CdRom,
            serial: unit.identity.serial.clone(),
            medium: unit.medium.as_ref().map(SavedMedium::of),
            unit_attentions: unit.unit_attentions.iter().collect(),
            modes: unit.modes,
            reservations: unit.reservations.clone(),
            stopped: unit.stopped,
            tray: unit.tray.clone(),
        })
    }

    /// Checks that `unit` was built in the same way, and can be in this state.
    pub fn check(&self, unit: &LogicalUnit) -> Result<(), UnitMismatch> {
        let require = |fits: bool, mismatch| if fits { Ok(()) } else { Err(mismatch) };
        let kind = match self.cdrom {
            true => DeviceKind::CdRom,
            false => DeviceKind::Disk,
        };
        require(unit.kind == kind, "kind")?;
        require(self.serial == unit.identity.serial, "serial number")?;
        let medium = unit.medium.as_ref();
        let fits = match (&self.medium, medium) {
            (Some(saved), Some(own)) => saved.fits(own, kind),
            (saved, own) => saved.is_none() && own.is_none(),
        };
        require(fits, "medium")?;
        let attentions = UnitAttentionQueue::from_saved(&self.unit_attentions);
        require(attentions.is_some(), "unit attentions")?;
        let cache = self
            .medium
            .as_ref()
            .is_some_and(|saved| saved.write_cache && !saved.read_only);
        require(cache || !self.modes.write_cache, "cache mode")?;
        let ReservationState { key, held, .. } = self.reservations;
        let possible = key != Some(0) && (held.is_none() || key.is_some());
        let shareable = medium.is_some_and(|limits| limits.shareable);
        let reserved = self.reservations != ReservationState::default();
        require(possible && !(shareable && reserved), "reservations")?;
        require(self.cdrom || self.tray == Tray::default(), "tray")
    }

    /// Sets a unit for which [`SavedUnit::check`] succeeds to this state. Returns true if its image has grown since.
    pub fn apply(self, unit: &mut LogicalUnit) -> bool {
        let mut grown = false;
        if let (Some(saved), Some(own)) = (&self.medium, &mut unit.medium) {
            grown = saved.blocks != own.blocks;
            // The initiator flushes only a cache that it has seen. Without one, each write is durable.
            own.write_cache = saved.write_cache;
        }
        unit.unit_attentions = UnitAttentionQueue::from_saved(&self.unit_attentions).unwrap_or_default();
        unit.modes = self.modes;
        unit.reservations = self.reservations;
        unit.stopped = self.stopped;
        unit.tray = self.tray;
        if grown {
            unit.unit_attentions.establish(UnitAttention::CapacityChanged);
        }
        grown
    }
}

impl LogicalUnit {
    /// Takes the unit attention conditions, so that commands that began before do not report them when they begin
    /// again.
    pub(crate) fn take_unit_attentions(&mut self) -> UnitAttentionQueue {
        std::mem::take(&mut self.unit_attentions)
    }

    /// Gives them back. Conditions that were established meanwhile follow.
    pub(crate) fn give_unit_attentions(&mut self, earlier: UnitAttentionQueue) {
        let later = std::mem::replace(&mut self.unit_attentions, earlier);
        later
            .iter()
            .for_each(|attention| self.unit_attentions.establish(attention));
    }
}
