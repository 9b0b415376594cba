//! A soft reboot: the power button was pressed, and the machine is reset when the guest powers off.

use std::time::{Duration, Instant};

/// Time after the press in which a power-off of the guest resets the machine. It passes only while the VM runs.
const WITHIN: Duration = Duration::from_secs(300);

/// The state of a soft reboot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SoftReboot {
    /// None is under way: a power-off ends the VM.
    #[default]
    No,
    /// Until then, a power-off resets the machine.
    Until(Instant),
    /// The VM is paused. After it resumes, a power-off resets the machine for this long.
    Left(Duration),
}

impl SoftReboot {
    /// The state after a press; [`SoftReboot::resume`] starts its time.
    pub(super) fn pressed() -> Self {
        Self::Left(WITHIN)
    }

    /// The state of a restored VM, from the time that was left.
    pub(super) fn restored(left: Option<Duration>) -> Self {
        left.map_or(Self::No, |left| Self::Left(left.min(WITHIN)))
    }

    /// The VM resumes.
    pub(super) fn resume(&mut self, now: Instant) {
        if let Self::Left(left) = *self {
            *self = Self::Until(now + left);
        }
    }

    /// The VM is paused.
    pub(super) fn pause(&mut self, now: Instant) {
        *self = Self::restored(self.left(now));
    }

    /// The time that is left; `None` if a power-off does not reset the machine.
    pub(super) fn left(&self, now: Instant) -> Option<Duration> {
        let left = match *self {
            Self::No => return None,
            Self::Until(until) => until.saturating_duration_since(now),
            Self::Left(left) => left,
        };
        (!left.is_zero()).then_some(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_time_passes_only_while_the_vm_runs() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut reboot = SoftReboot::pressed();
        reboot.resume(at(0));
        reboot.pause(at(100));
        reboot.pause(at(900));
        assert_eq!(reboot.left(at(1000)), Some(Duration::from_secs(200)));
        let mut reboot = SoftReboot::restored(reboot.left(at(1000)));
        reboot.resume(at(1000));
        assert_eq!(reboot.left(at(1199)), Some(Duration::from_secs(1)));
        assert_eq!(reboot.left(at(1200)), None);
        reboot.pause(at(1200));
        assert_eq!(reboot, SoftReboot::No);
        reboot.resume(at(1201));
        assert_eq!(reboot, SoftReboot::No);
    }

    #[test]
    fn a_saved_time_is_at_most_that_of_a_press() {
        let restored = SoftReboot::restored(Some(Duration::MAX));
        assert_eq!(restored, SoftReboot::pressed());
    }
}
