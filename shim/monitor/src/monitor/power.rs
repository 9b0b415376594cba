//! The schedule of a graceful shutdown.

use std::time::Duration;

use tokio::time::Instant;

/// Interval between presses of the power button. A guest may ignore it while it boots.
const PRESS_EVERY: Duration = Duration::from_secs(5);
/// Longest grace period; a longer one is shortened to it. It keeps the arithmetic of clocks from overflowing.
pub const LONGEST_GRACE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// A graceful shutdown under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GracefulShutdown {
    next_press: Instant,
    deadline: Instant,
    grace_seconds: u64,
}

/// The next step of a shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShutdownStep {
    Press,
    Kill { grace_seconds: u64 },
    Nothing,
}

impl GracefulShutdown {
    /// Records a request at `now`. The first press is due at once. The earlier deadline of two requests applies.
    pub(super) fn requested(
        before: Option<GracefulShutdown>,
        grace_seconds: u64,
        now: Instant,
    ) -> GracefulShutdown {
        let deadline = now + Duration::from_secs(grace_seconds).min(LONGEST_GRACE);
        match before {
            Some(before) if before.deadline <= deadline => GracefulShutdown {
                next_press: now,
                ..before
            },
            _ => GracefulShutdown {
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

    /// Time of the next step.
    pub(super) fn next_deadline(&self) -> Instant {
        self.next_press.min(self.deadline)
    }

    /// Returns the step that is due at `now`. A press is returned once.
    pub(super) fn due(&mut self, now: Instant) -> ShutdownStep {
        if now >= self.deadline {
            return ShutdownStep::Kill {
                grace_seconds: self.grace_seconds,
            };
        }
        if now >= self.next_press {
            self.next_press = now + PRESS_EVERY;
            return ShutdownStep::Press;
        }
        ShutdownStep::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn button_is_pressed_until_the_grace_period_ends() {
        let start = Instant::now();
        let mut stopping = GracefulShutdown::requested(None, 12, start);
        let mut presses = Vec::new();
        let mut now = start;
        let end = loop {
            match stopping.due(now) {
                ShutdownStep::Press => presses.push((now - start).as_secs()),
                ShutdownStep::Nothing => {}
                kill => break kill,
            }
            now = stopping.next_deadline();
        };
        assert_eq!(presses, [0, 5, 10]);
        assert_eq!(
            (end, now),
            (ShutdownStep::Kill { grace_seconds: 12 }, at(start, 12))
        );
    }

    #[test]
    fn earlier_deadline_applies() {
        let start = Instant::now();
        let long = GracefulShutdown::requested(None, 60, start);
        assert_eq!(
            GracefulShutdown::requested(Some(long), 5, start).next_deadline(),
            start
        );
        assert_eq!(
            GracefulShutdown::requested(Some(long), 5, start).grace_seconds(),
            5
        );
        assert_eq!(
            GracefulShutdown::requested(Some(long), 90, start).grace_seconds(),
            60
        );
        assert_eq!(
            GracefulShutdown::requested(Some(long), 0, start).due(start),
            ShutdownStep::Kill { grace_seconds: 0 }
        );
        // The longest grace period does not panic.
        let mut endless = GracefulShutdown::requested(None, u64::MAX, start);
        assert_eq!(endless.due(start), ShutdownStep::Press);
    }
}
