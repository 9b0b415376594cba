//! State of the tray of a CD-ROM drive.

/// State of the tray, and the pending media event.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tray {
    pub open: bool,
    /// PREVENT ALLOW MEDIUM REMOVAL is in force.
    pub prevented: bool,
    /// Event for GET EVENT STATUS NOTIFICATION (MMC-6, section 6).
    pub event: Option<MediaEvent>,
}

/// Media events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum MediaEvent {
    EjectRequest = 1,
    NewMedia = 2,
    MediaRemoval = 3,
}
