//! Output of a guest on its serial line with its times, as the host's kernel saw it, before either VMM.

use crate::trace::{self, Event};
use anyhow::{Context, Result};
use std::time::{Duration, Instant};

/// Filter of kvm_pio events for bytes that are written to COM1.
pub const FILTER: &str = "port == 0x3f8 && rw == 1";

/// The bytes, each with its time.
#[derive(Debug)]
pub struct ConsoleTrace {
    text: Vec<u8>,
    /// Time in seconds of the monotonic clock.
    moments: Vec<f64>,
    /// The same time by both clocks.
    now: (Instant, f64),
}

impl ConsoleTrace {
    /// Parses the text form of a trace.
    pub fn read(trace: &str) -> Result<Self> {
        let clock = trace::now()?;
        let now = (Instant::now(), clock);
        let events = trace.lines().filter_map(Event::parse);
        let bytes = events.filter_map(|event| Some((event.serial_byte()?, event.time)));
        let (text, moments) = bytes.unzip();
        Ok(Self { text, moments, now })
    }

    /// Time from `start` until the guest printed `words`, which it prints once.
    pub fn since(&self, start: Instant, words: &str) -> Result<Duration> {
        let mut places = self.text.windows(words.len());
        let place = places.position(|window| window == words.as_bytes());
        let last = place.with_context(|| format!("the trace shows no {words:?}"))? + words.len() - 1;
        let (now, clock) = self.now;
        let start = clock - (now - start).as_secs_f64();
        Ok(Duration::try_from_secs_f64(self.moments[last] - start)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_the_moment_of_their_last_byte() {
        let clock = trace::now().expect("a clock");
        let start = Instant::now();
        let line = |byte: char, after: f64| {
            let time = clock + after;
            format!(
                "     vcpu0-97  [000] ..... {time:.6}: kvm_pio: pio_write at 0x3f8 size 1 count 1 val {:#x} \n",
                u32::from(byte)
            )
        };
        let trace = [
            line('+', 0.1),
            line('d', 0.2),
            line('1', 0.3),
            line(';', 0.4),
            line('\r', 0.5),
        ]
        .concat();
        let trace = ConsoleTrace::read(&format!("# tracer: nop\n{trace}")).expect("a trace");
        let took = trace.since(start, "+d1;").expect("trace").as_secs_f64();
        assert!((took - 0.4).abs() < 0.05, "{took}");
        assert!(trace.since(start, "-d1;").is_err());
    }
}
