//! Unit attention conditions (SAM-5, section 5.14).

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::sense::{Sense, SenseKey};

/// A unit attention condition, reported once, with the next command that may report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnitAttention {
    /// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED
    PowerOn,
    /// SCSI BUS RESET OCCURRED
    TargetReset,
    /// BUS DEVICE RESET FUNCTION OCCURRED
    UnitReset,
    /// I_T NEXUS LOSS OCCURRED
    NexusLoss,
    /// NOT READY TO READY CHANGE, MEDIUM MAY HAVE CHANGED
    MediumChanged,
    /// MODE PARAMETERS CHANGED, by another initiator
    ModeChanged,
    /// CAPACITY DATA HAS CHANGED
    CapacityChanged,
    /// INQUIRY DATA HAS CHANGED
    InquiryChanged,
    /// REPORTED LUNS DATA HAS CHANGED
    LunsChanged,
}

impl UnitAttention {
    pub(crate) const fn sense(self) -> Sense {
        let (asc, ascq) = match self {
            Self::PowerOn => (0x29, 0x00),
            Self::TargetReset => (0x29, 0x02),
            Self::UnitReset => (0x29, 0x03),
            Self::NexusLoss => (0x29, 0x07),
            Self::MediumChanged => (0x28, 0x00),
            Self::ModeChanged => (0x2a, 0x01),
            Self::CapacityChanged => (0x2a, 0x09),
            Self::InquiryChanged => (0x3f, 0x03),
            Self::LunsChanged => (0x3f, 0x0e),
        };
        Sense::new(SenseKey::UnitAttention, asc, ascq)
    }
}

/// Pending unit attention conditions, oldest first, without duplicates.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnitAttentionQueue(VecDeque<UnitAttention>);

impl UnitAttentionQueue {
    pub fn establish(&mut self, attention: UnitAttention) {
        if attention == UnitAttention::PowerOn {
            // A power on clears all earlier conditions.
            self.0.clear();
        }
        if !self.0.contains(&attention) {
            self.0.push_back(attention);
        }
    }

    /// Removes and returns the condition to report.
    pub fn take(&mut self) -> Option<UnitAttention> {
        self.0.pop_front()
    }

    /// The conditions, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = UnitAttention> {
        self.0.iter().copied()
    }

    /// These conditions, oldest first. `None` if one is there twice.
    pub fn from_saved(saved: &[UnitAttention]) -> Option<Self> {
        let twice = |(at, attention)| saved[..at].contains(attention);
        let any = saved.iter().enumerate().any(twice);
        (!any).then(|| Self(saved.iter().copied().collect()))
    }

    pub fn clear(&mut self, attention: UnitAttention) {
        self.0.retain(|&a| a != attention);
    }
}
