//! The time after which frozen file systems are thawed although nobody asks for it.

use std::time::{Duration, Instant};

/// Time between two attempts to thaw.
const RETRY: Duration = Duration::from_secs(5);

/// Remembers that the guest's file systems may be frozen, and when to thaw them. The owner sends the commands.
///
/// KubeVirt starts its timer after `guest-fsfreeze-freeze` has succeeded, and forgets it before any attempt to thaw.
/// Here it runs from before the freeze until a thaw has succeeded: a freeze whose reply was late may have taken
/// effect, and a guest whose thaw failed is still frozen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreezeGuard {
    /// When to thaw; `None` while nothing is frozen, or without a timeout.
    thaw_at: Option<Instant>,
}

impl FreezeGuard {
    /// Timeout of virt-freezer and of a VirtualMachineSnapshot that do not say another. A request by the API must say
    /// one.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

    /// The timeout of KubeVirt's `unfreezeTimeoutSeconds`. As in KubeVirt 0 is none, and a negative number is over at
    /// once.
    #[must_use]
    pub fn timeout(seconds: i32) -> Option<Duration> {
        (seconds != 0).then(|| Duration::from_secs(seconds.try_into().unwrap_or(0)))
    }

    /// To be called before the freeze is sent, and only if the file systems are thawed: KubeVirt takes a freeze of
    /// frozen ones for done and leaves the timer alone.
    pub fn freezing(&mut self, now: Instant, timeout: Option<Duration>) {
        self.thaw_at = timeout.and_then(|timeout| now.checked_add(timeout));
    }

    /// The agent refused the freeze, or it was not sent. The agent has thawed what it had frozen.
    pub fn freeze_refused(&mut self) {
        self.thaw_at = None;
    }

    /// A thaw succeeded, or the status is thawed, or the guest has rebooted.
    pub fn thawed(&mut self) {
        self.thaw_at = None;
    }

    /// A thaw failed. If the time is over, the next attempt is due in 5 s.
    pub fn thaw_failed(&mut self, now: Instant) {
        if self.is_due(now) {
            self.thaw_at = now.checked_add(RETRY);
        }
    }

    /// True if the file systems must be thawed now.
    #[must_use]
    pub fn is_due(&self, now: Instant) -> bool {
        self.thaw_at.is_some_and(|time| time <= now)
    }

    /// When the file systems must be thawed.
    #[must_use]
    pub fn thaw_at(&self) -> Option<Instant> {
        self.thaw_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_kubevirt() {
        assert_eq!(FreezeGuard::timeout(300), Some(FreezeGuard::DEFAULT_TIMEOUT));
        assert_eq!(FreezeGuard::timeout(0), None);
        assert_eq!(FreezeGuard::timeout(-1), Some(Duration::ZERO));
    }

    #[test]
    fn a_thaw_is_due_until_it_succeeds() {
        let start = Instant::now();
        let mut guard = FreezeGuard::default();
        assert!(!guard.is_due(start));
        guard.freezing(start, Some(Duration::from_secs(10)));
        assert!(!guard.is_due(start + Duration::from_secs(9)));
        // By request, too early for the timer.
        guard.thaw_failed(start + Duration::from_secs(9));
        let over = start + Duration::from_secs(10);
        assert_eq!(guard.thaw_at(), Some(over));
        assert!(guard.is_due(over));
        guard.thaw_failed(over);
        assert!(!guard.is_due(over));
        assert!(guard.is_due(over + RETRY));
        guard.thawed();
        assert_eq!(guard.thaw_at(), None);
    }

    #[test]
    fn without_timeout_or_freeze_nothing_is_due() {
        let start = Instant::now();
        let mut guard = FreezeGuard::default();
        guard.freezing(start, None);
        assert_eq!(guard.thaw_at(), None);
        guard.freezing(start, Some(Duration::MAX));
        assert_eq!(guard.thaw_at(), None);
        guard.freezing(start, Some(Duration::ZERO));
        assert!(guard.is_due(start));
        guard.freeze_refused();
        assert!(!guard.is_due(start));
    }
}
