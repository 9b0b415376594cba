//! Persistent reservations of a unit that one I_T nexus can reach (SPC-4, "Reservations").
//!
//! The holder of the reservation is the only initiator, so no medium access conflicts. What remains are the rules for
//! changing keys and reservations, and RESERVATION CONFLICT for violations. Reservations do not survive a power loss
//! (no APTPL). Units that others share do not have them.

use serde::{Deserialize, Serialize};

use super::command_error::CommandError;
use super::sense::Sense;

/// Reservation types (SPC-4, section 6.15).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub(crate) enum ReservationType {
    WriteExclusive = 1,
    ExclusiveAccess = 3,
    WriteExclusiveRegistrants = 5,
    ExclusiveAccessRegistrants = 6,
    WriteExclusiveAll = 7,
    ExclusiveAccessAll = 8,
}

impl ReservationType {
    pub fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::WriteExclusive,
            3 => Self::ExclusiveAccess,
            5 => Self::WriteExclusiveRegistrants,
            6 => Self::ExclusiveAccessRegistrants,
            7 => Self::WriteExclusiveAll,
            8 => Self::ExclusiveAccessAll,
            _ => return None,
        })
    }

    /// True if every registrant is a holder.
    pub fn all_registrants(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }
}

/// Registration and reservation of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReservationState {
    /// PRGENERATION
    pub generation: u32,
    /// Key of the nexus, if it is registered; not 0.
    pub key: Option<u64>,
    /// The reservation that the nexus holds; `None` without a key.
    pub held: Option<ReservationType>,
}

impl ReservationState {
    /// Checks that the nexus is registered with `key`.
    fn registered(&self, key: u64) -> Result<(), CommandError> {
        if self.key == Some(key) {
            Ok(())
        } else {
            Err(CommandError::Conflict)
        }
    }

    fn count(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    fn unregister(&mut self) {
        self.key = None;
        // The only holder is gone, so the reservation is released.
        self.held = None;
    }

    /// REGISTER, or REGISTER AND IGNORE EXISTING KEY if `key` is `None`.
    pub fn register(&mut self, key: Option<u64>, new: u64) -> Result<(), CommandError> {
        if key.is_some_and(|key| self.key.unwrap_or(0) != key) {
            return Err(CommandError::Conflict);
        }
        match (self.key, new) {
            (None, 0) => return Ok(()),
            (Some(_), 0) => self.unregister(),
            _ => self.key = Some(new),
        }
        self.count();
        Ok(())
    }

    /// RESERVE
    pub fn reserve(&mut self, key: u64, kind: ReservationType) -> Result<(), CommandError> {
        self.registered(key)?;
        match self.held {
            Some(held) if held != kind => Err(CommandError::Conflict),
            _ => {
                self.held = Some(kind);
                Ok(())
            }
        }
    }

    /// RELEASE
    pub fn release(&mut self, key: u64, kind: ReservationType) -> Result<(), CommandError> {
        self.registered(key)?;
        if self.held.is_some_and(|held| held != kind) {
            return Err(Sense::INVALID_RELEASE.into());
        }
        self.held = None;
        Ok(())
    }

    /// CLEAR
    pub fn clear(&mut self, key: u64) -> Result<(), CommandError> {
        self.registered(key)?;
        self.unregister();
        self.count();
        Ok(())
    }

    /// PREEMPT and PREEMPT AND ABORT. Other initiators, whose tasks could be aborted, do not exist.
    pub fn preempt(&mut self, key: u64, victim: u64, kind: ReservationType) -> Result<(), CommandError> {
        self.registered(key)?;
        match self.held {
            // Preempts all registrants except the nexus, which takes the reservation over from itself.
            Some(held) if held.all_registrants() && victim == 0 => self.held = Some(kind),
            // Preempts the holder, which stays registered as it is the nexus itself.
            Some(held) if !held.all_registrants() && victim == key => self.held = Some(kind),
            // SERVICE ACTION RESERVATION KEY is the second field of the list.
            _ if victim == 0 => return Err(Sense::invalid_parameter(8, None).into()),
            // The key does not hold the reservation alone, so its registrations are removed.
            _ if victim == key => self.unregister(),
            _ => return Err(CommandError::Conflict),
        }
        self.count();
        Ok(())
    }
}
