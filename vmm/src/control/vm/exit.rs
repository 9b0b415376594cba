//! The end of a VM.

use husk_proto::vmm::v1::ExitReason;

/// The end of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmExit {
    /// Reason.
    pub reason: ExitReason,
    /// Human-readable details.
    pub detail: String,
}

impl VmExit {
    pub(super) fn new(reason: ExitReason, detail: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
        }
    }

    pub(super) fn error(error: impl std::fmt::Display) -> Self {
        Self::new(ExitReason::Error, error.to_string())
    }

    /// The VMM's exit status, as listed in `vmm.proto`.
    pub fn status(&self) -> u8 {
        match self.reason {
            ExitReason::Poweroff => 0,
            ExitReason::GuestPanic => 10,
            ExitReason::TripleFault => 11,
            ExitReason::BootFailed => 12,
            ExitReason::ControlClosed => 13,
            ExitReason::Watchdog => 14,
            ExitReason::Error | ExitReason::Unspecified => 1,
        }
    }
}
