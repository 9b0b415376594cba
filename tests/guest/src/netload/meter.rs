//! Measures the data received per second.

use anyhow::{Context, Result};
use std::time::{Duration, Instant};

/// Duration of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Warm-up, which is not measured.
    ramp: Duration,
    /// Measured time.
    time: Duration,
}

impl Times {
    /// Creates it from milliseconds.
    pub fn milliseconds(ramp: u64, time: u64) -> Self {
        Self {
            ramp: Duration::from_millis(ramp),
            time: Duration::from_millis(time),
        }
    }

    /// Encodes it as words, for the peer.
    pub fn words(&self) -> String {
        format!("{} {}", self.ramp.as_millis(), self.time.as_millis())
    }

    /// Parses such words.
    pub fn parse<'a>(mut words: impl Iterator<Item = &'a str>) -> Result<Self> {
        let mut next = || words.next()?.parse().ok();
        let ramp = next().context("no ramp")?;
        Ok(Self::milliseconds(ramp, next().context("no time")?))
    }

    /// Time at which the sender may stop: the receiver has measured long enough then, even if a busy machine started it
    /// later.
    pub fn over(&self) -> Instant {
        Instant::now() + self.ramp + self.time + Duration::from_secs(2)
    }
}

/// Counts received data.
#[derive(Debug)]
pub struct Meter {
    ramp: Instant,
    time: Duration,
    /// Arrival of the first data after the warm-up: counting starts there, and this data is not counted.
    began: Option<Instant>,
    count: u64,
}

impl Meter {
    /// Starts the meter now.
    pub fn new(times: Times) -> Self {
        Self {
            ramp: Instant::now() + times.ramp,
            time: times.time,
            began: None,
            count: 0,
        }
    }

    /// Adds received data. Returns the rate per second once the measurement is over.
    pub fn heard(&mut self, amount: usize) -> Option<f64> {
        self.at(Instant::now(), amount)
    }

    fn at(&mut self, now: Instant, amount: usize) -> Option<f64> {
        match self.began {
            None if now >= self.ramp => self.began = Some(now),
            None => {}
            Some(began) => {
                self.count += amount as u64;
                let took = now - began;
                if took >= self.time {
                    return Some(self.count as f64 / took.as_secs_f64());
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_excludes_the_time_before_its_start() {
        let mut meter = Meter::new(Times::milliseconds(100, 1000));
        let begin = meter.ramp;
        let second = |seconds: u64| begin + Duration::from_secs(seconds);
        assert_eq!(meter.at(begin - Duration::from_millis(1), 1000), None);
        assert_eq!(meter.at(second(1), 500), None);
        assert_eq!(meter.at(second(1), 30), None);
        assert_eq!(meter.at(second(3), 70), Some(50.0));
    }

    #[test]
    fn times_travel_as_words() {
        let times = Times::milliseconds(10, 200);
        assert_eq!(Times::parse(times.words().split(' ')).expect("times"), times);
        assert!(Times::parse("10".split(' ')).is_err());
    }
}
