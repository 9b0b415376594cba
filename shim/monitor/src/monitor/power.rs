//! When to press the power button again, and when to stop asking.

use std::time::Duration;

use tokio::time::Instant;

/// A guest may ignore the button while it boots, so it is pressed again.
const PRESS_EVERY: Duration = Duration::from_secs(5);
/// Longer grace periods end here; the clock's arithmetic has an end.
const LONGEST_GRACE: u64 = 10 * 365 * 24 * 3600;

/// A graceful end under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stopping {
    next_press: Instant,
    deadline: Instant,
    grace_seconds: u64,
}

/// What is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    Press,
    Kill { grace_seconds: u64 },
    Nothing,
}

impl Stopping {
    /// Asked at `now`; the first press is due at once. Of two requests the earlier deadline holds.
    pub(super) fn asked(before: Option<Stopping>, grace_seconds: u64, now: Instant) -> Stopping {
        let deadline = now + Duration::from_secs(grace_seconds.min(LONGEST_GRACE));
        match before {
            Some(before) if before.deadline <= deadline => Stopping {
                next_press: now,
                ..before
            },
            _ => Stopping {
                next_press: now,
                deadline,
                grace_seconds,
            },
        }
    }

    /// The grace period in effect.
    pub(super) fn grace_seconds(&self) -> u64 {
        self.grace_seconds
    }

    /// When to look again.
    pub(super) fn wake_at(&self) -> Instant {
        self.next_press.min(self.deadline)
    }

    /// What is due at `now`; a press is told once.
    pub(super) fn due(&mut self, now: Instant) -> Due {
        if now >= self.deadline {
            return Due::Kill {
                grace_seconds: self.grace_seconds,
            };
        }
        if now >= self.next_press {
            self.next_press = now + PRESS_EVERY;
            return Due::Press;
        }
        Due::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn the_button_is_pressed_until_the_grace_period_ends() {
        let start = Instant::now();
        let mut stopping = Stopping::asked(None, 12, start);
        let mut presses = Vec::new();
        let mut now = start;
        let end = loop {
            match stopping.due(now) {
                Due::Press => presses.push((now - start).as_secs()),
                Due::Nothing => {}
                kill => break kill,
            }
            now = stopping.wake_at();
        };
        assert_eq!(presses, [0, 5, 10]);
        assert_eq!((end, now), (Due::Kill { grace_seconds: 12 }, at(start, 12)));
    }

    #[test]
    fn the_earlier_deadline_holds() {
        let start = Instant::now();
        let long = Stopping::asked(None, 60, start);
        assert_eq!(Stopping::asked(Some(long), 5, start).wake_at(), start);
        assert_eq!(Stopping::asked(Some(long), 5, start).grace_seconds(), 5);
        assert_eq!(Stopping::asked(Some(long), 90, start).grace_seconds(), 60);
        assert_eq!(
            Stopping::asked(Some(long), 0, start).due(start),
            Due::Kill { grace_seconds: 0 }
        );
        // No panic at the end of time.
        let mut endless = Stopping::asked(None, u64::MAX, start);
        assert_eq!(endless.due(start), Due::Press);
    }
}
