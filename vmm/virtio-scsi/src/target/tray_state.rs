//! State of the tray of a CD-ROM drive.

use serde::{Deserialize, Serialize};

/// State of the tray, and the pending media event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tray {
    pub open: bool,
    /// PREVENT ALLOW MEDIUM REMOVAL is in force.
    pub prevented: bool,
    /// Event for GET EVENT STATUS NOTIFICATION (MMC-6, section 6).
    pub event: Option<MediaEvent>,
}

/// Media events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub(crate) enum MediaEvent {
    EjectRequest = 1,
    NewMedia = 2,
    MediaRemoval = 3,
}
