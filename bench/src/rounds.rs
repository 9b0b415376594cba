//! Rounds of cases, in which a few runs may fail.

use super::message;
use anyhow::Result;
use std::cell::Cell;

/// Number of runs that may fail before the benchmark fails: an emulated processor may hang once.
#[derive(Debug)]
pub struct Attempts {
    spare: Cell<u32>,
}

impl Attempts {
    /// Allows this number of failures.
    pub fn new(spare: u32) -> Self {
        Self {
            spare: Cell::new(spare),
        }
    }

    /// Runs `work`, and repeats it if it fails while failures are left.
    pub fn run(&self, case: &str, what: &str, mut work: impl FnMut() -> Result<()>) -> Result<()> {
        message::news(format!("{case}: {what}"));
        loop {
            match work() {
                Ok(()) => return Ok(()),
                Err(error) if self.spare.get() > 0 => {
                    self.spare.set(self.spare.get() - 1);
                    message::failed(format!("{case}: {what}: {error:#}"));
                }
                Err(error) => return Err(error.context(format!("{case}: {what}"))),
            }
        }
    }
}

/// The same cases, rotated so that each round starts with another.
pub fn rotated<T: Clone>(cases: &[T], run: u32) -> Vec<T> {
    let mut cases = cases.to_vec();
    if !cases.is_empty() {
        let first = run as usize % cases.len();
        cases.rotate_left(first);
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn every_case_is_first_in_some_round() {
        let mut first: Vec<_> = (1..=3).map(|run| rotated(&['a', 'b', 'c'], run)[0]).collect();
        first.sort_unstable();
        assert_eq!(first, ['a', 'b', 'c']);
        assert!(rotated::<char>(&[], 1).is_empty());
    }

    #[test]
    fn failed_runs_are_repeated_while_spare_runs_are_left() {
        let attempts = Attempts::new(2);
        let mut done = 0;
        let mut work = |fail| {
            attempts.run("case", "a round", || {
                done += 1;
                if done <= fail { bail!("bad luck") } else { Ok(()) }
            })
        };
        assert!(work(2).is_ok());
        assert!(work(4).is_err());
        assert_eq!(done, 4);
    }
}
