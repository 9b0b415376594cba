//! Reasons for which a VM is paused. It runs while there is none.

/// A reason to pause a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PauseReason {
    /// The monitor asked for it.
    User = 1,
    /// A disk holds failed requests.
    IoError = 2,
    /// The action of a watchdog that ran out.
    Watchdog = 4,
}

/// A set of reasons.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PauseReasons(u8);

impl PauseReasons {
    /// Reasons that end when the monitor resumes the VM: that tries failed requests again.
    const OF_USER: u8 = PauseReason::User as u8 | PauseReason::IoError as u8 | PauseReason::Watchdog as u8;

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(super) fn insert(&mut self, reason: PauseReason) {
        self.0 |= reason as u8;
    }

    /// Removes the reasons that end when the monitor resumes the VM.
    pub(super) fn resume(&mut self) {
        self.0 &= !Self::OF_USER;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resume_ends_each_reason_of_the_user() {
        let mut reasons = PauseReasons::default();
        assert!(reasons.is_empty());
        reasons.insert(PauseReason::IoError);
        reasons.insert(PauseReason::User);
        reasons.insert(PauseReason::User);
        assert!(!reasons.is_empty());
        reasons.resume();
        assert!(reasons.is_empty());
    }
}
