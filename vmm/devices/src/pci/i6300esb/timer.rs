//! The two stages of the watchdog's timer, on the clock of the caller.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One cycle of the PCI bus, which the timer counts.
const CYCLE: Duration = Duration::from_nanos(30);
/// Shortest stage. A guest cannot have the host's timer go off more often.
const SHORTEST: Duration = Duration::from_millis(1);
/// Longest stage.
pub(super) const LONGEST: Duration = CYCLE.saturating_mul(PRELOAD_MASK).saturating_mul(1 << 15);
/// The preload registers have 20 bits.
pub(super) const PRELOAD_MASK: u32 = 0xf_ffff;

/// The length of one count of the timer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Scale {
    /// 2^15 cycles, about 1 ms.
    #[default]
    Khz,
    /// 2^5 cycles, about 1 µs.
    Mhz,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stage {
    First,
    Second,
}

/// The timer.
#[derive(Clone, Debug)]
pub(super) struct Timer {
    /// Counts of the two stages. A change holds for the next start of that stage.
    pub(super) preload: [u32; 2],
    pub(super) scale: Scale,
    /// The present stage and its end, while the timer runs.
    running: Option<(Stage, Duration)>,
}

impl Timer {
    /// A stopped timer with the longest stages.
    pub(super) fn new() -> Self {
        Self {
            preload: [PRELOAD_MASK; 2],
            scale: Scale::default(),
            running: None,
        }
    }

    /// Starts the first stage, whether or not the timer runs.
    pub(super) fn start(&mut self, now: Duration) {
        self.enter(Stage::First, now);
    }

    pub(super) fn stop(&mut self) {
        self.running = None;
    }

    /// End of the present stage; `None` while the timer is stopped.
    pub(super) fn due(&self) -> Option<Duration> {
        self.running.map(|(_, due)| due)
    }

    /// Ends the present stage if it is over. True if it was the second; the timer has stopped then.
    pub(super) fn expire(&mut self, now: Duration) -> bool {
        match self.running {
            Some((Stage::First, due)) if due <= now => {
                self.enter(Stage::Second, now);
                false
            }
            Some((Stage::Second, due)) if due <= now => {
                self.running = None;
                true
            }
            _ => false,
        }
    }

    /// The present stage and the time that is left of it, while the timer runs.
    pub(super) fn left(&self, now: Duration) -> Option<(Stage, Duration)> {
        self.running.map(|(stage, due)| (stage, due.saturating_sub(now)))
    }

    /// Continues a stage of which `left` is left, or stops.
    pub(super) fn set_left(&mut self, running: Option<(Stage, Duration)>, now: Duration) {
        self.running = running.map(|(stage, left)| (stage, now.saturating_add(left)));
    }

    fn enter(&mut self, stage: Stage, now: Duration) {
        let count = self.preload[stage as usize] & PRELOAD_MASK;
        let cycles = match self.scale {
            Scale::Khz => 1 << 15,
            Scale::Mhz => 1 << 5,
        };
        let length = (CYCLE * cycles).saturating_mul(count).max(SHORTEST);
        self.running = Some((stage, now.saturating_add(length)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn stages_last_as_their_preloads_and_the_scale_say() {
        let mut timer = Timer::new();
        timer.preload = [2048, 3_000_000 & PRELOAD_MASK];
        timer.start(ms(100));
        assert_eq!(timer.due(), Some(ms(100) + Duration::from_nanos(983_040) * 2048));
        assert!(
            !timer.expire(ms(2100)) && !timer.expire(ms(3000)),
            "the second stage follows"
        );
        timer.stop();
        timer.scale = Scale::Mhz;
        timer.start(ms(0));
        assert_eq!(timer.due(), Some(Duration::from_nanos(960) * 2048));
        assert!(!timer.expire(ms(3)));
        assert_eq!(
            timer.due(),
            Some(ms(3) + Duration::from_nanos(960) * (3_000_000 & PRELOAD_MASK))
        );
        assert!(timer.expire(ms(3000)));
        assert_eq!(timer.due(), None);
        assert!(!timer.expire(ms(9000)), "once");
    }

    #[test]
    fn a_start_begins_again_and_the_longest_time_is_about_34_minutes() {
        let mut timer = Timer::new();
        timer.start(ms(0));
        timer.start(ms(500_000));
        let stage = Duration::from_nanos(983_040) * PRELOAD_MASK;
        assert_eq!(timer.due(), Some(ms(500_000) + stage));
        assert!(!timer.expire(ms(500_000) + stage));
        assert_eq!(timer.due(), Some(ms(500_000) + stage * 2));
        assert_eq!((stage * 2).as_secs(), 2061);
    }

    #[test]
    fn no_stage_is_shorter_than_a_millisecond() {
        let mut timer = Timer::new();
        for (preload, scale) in [
            (0, Scale::Khz),
            (0, Scale::Mhz),
            (1, Scale::Mhz),
            (1041, Scale::Mhz),
        ] {
            (timer.preload, timer.scale) = ([preload; 2], scale);
            timer.start(ms(7));
            assert_eq!(timer.due(), Some(ms(8)), "{preload} {scale:?}");
        }
    }
}
