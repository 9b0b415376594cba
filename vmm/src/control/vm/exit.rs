//! The end of a VM.

use husk_proto::vmm::v1::ExitReason;

/// Maximum length of the details in bytes: a disk chooses some of them, and a gRPC status is sent in a header.
const DETAIL_BYTES: usize = 4096;

/// The end of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmExit {
    /// Reason.
    pub reason: ExitReason,
    /// Human-readable details, at most 4 KiB.
    pub detail: String,
}

impl VmExit {
    pub(super) fn new(reason: ExitReason, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        let end = (0..=DETAIL_BYTES.min(detail.len())).rfind(|&end| detail.is_char_boundary(end));
        detail.truncate(end.unwrap_or(0));
        Self { reason, detail }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_details_are_cut() {
        let exit = VmExit::error("ä".repeat(DETAIL_BYTES));
        assert_eq!(exit.detail, "ä".repeat(DETAIL_BYTES / 2));
        assert_eq!(VmExit::error("a reason").detail, "a reason");
    }
}
