//! Rate limit of guest requests that are costly for the host.

use std::time::{Duration, Instant};

/// At most this many requests in a burst, then one per [`INTERVAL`].
const BURST: u32 = 128;
const INTERVAL: Duration = Duration::from_millis(5);

/// Rate limit of the requests that are costly for the host.
#[derive(Debug)]
pub struct Throttle {
    tokens: u32,
    since: Instant,
}

impl Throttle {
    /// A limit that has not been used.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            tokens: BURST,
            since: now,
        }
    }

    /// Time to wait before the next request, or `None`.
    pub fn wait(&mut self, now: Instant) -> Option<Duration> {
        let elapsed = now.saturating_duration_since(self.since);
        let earned = elapsed.as_millis() / INTERVAL.as_millis();
        if earned >= BURST.into() {
            *self = Self::new(now);
        } else {
            self.tokens = BURST.min(self.tokens + earned as u32);
            self.since += INTERVAL * earned as u32;
        }
        self.is_exhausted().then_some(INTERVAL)
    }

    /// Counts a costly request.
    pub fn charge(&mut self) {
        self.tokens = self.tokens.saturating_sub(1);
    }

    /// True if no request may be served before [`Throttle::wait`] returns `None`.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.tokens == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_a_trickle() {
        let start = Instant::now();
        let mut throttle = Throttle::new(start);
        for _ in 0..BURST {
            assert_eq!(throttle.wait(start), None);
            throttle.charge();
        }
        assert_eq!(throttle.wait(start), Some(INTERVAL));
        for round in 1..5 {
            assert_eq!(throttle.wait(start + INTERVAL * round), None);
            throttle.charge();
            assert_eq!(throttle.wait(start + INTERVAL * round), Some(INTERVAL));
        }
        assert_eq!(throttle.wait(start + Duration::from_secs(3600)), None);
        assert_eq!(throttle.tokens, BURST);
    }
}
