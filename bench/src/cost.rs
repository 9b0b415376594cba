//! Host CPU time and VM exits per second of a guest's work.

use super::kvm;
use super::started::Started;
use anyhow::Result;
use std::time::{Duration, Instant};

/// Most time that is left out at both ends of a measurement.
const MARGIN: Duration = Duration::from_millis(250);

/// CPU time per second of load.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// Seconds of CPU time of the VMM and its descendants.
    pub all: f64,
    /// The guest's share of it.
    pub guest: f64,
    /// Number of VM exits, if KVM reports them.
    pub exits: Option<f64>,
}

impl Cost {
    /// Measures between two times, without a margin at both ends. Returns before the second.
    pub fn between(started: &Started, begin: Instant, end: Instant) -> Result<Self> {
        let margin = MARGIN.min((end - begin) / 5);
        sleep_until(begin + margin);
        let before = Sample::take(started)?;
        sleep_until(end - margin);
        let after = Sample::take(started)?;
        let time = (after.when - before.when).as_secs_f64();
        let exits = after.exits.zip(before.exits);
        Ok(Self {
            all: (after.cpu - before.cpu).as_secs_f64() / time,
            guest: (after.guest - before.guest).as_secs_f64() / time,
            exits: exits.map(|(after, before)| (after - before) as f64 / time),
        })
    }
}

/// CPU time used so far.
struct Sample {
    when: Instant,
    cpu: Duration,
    guest: Duration,
    exits: Option<u64>,
}

impl Sample {
    fn take(started: &Started) -> Result<Self> {
        Ok(Self {
            when: Instant::now(),
            cpu: started.group.cpu()?,
            guest: started.group.guest()?,
            exits: kvm::exits(&started.group)?,
        })
    }
}

fn sleep_until(when: Instant) {
    std::thread::sleep(when.saturating_duration_since(Instant::now()));
}
