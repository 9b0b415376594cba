//! Rounds of cases, in which a few runs may fail.

use super::cases::BenchCase;
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

    /// Runs `work` once on each case, to warm up.
    pub fn warm_up<C: BenchCase>(&self, cases: &[C], mut work: impl FnMut(C) -> Result<()>) -> Result<()> {
        for &case in cases {
            self.run(case.name(), "warming up", || work(case))?;
        }
        Ok(())
    }

    /// Runs `work` on each case in each of a number of rounds.
    pub fn rounds<C: BenchCase>(
        &self,
        cases: &[C],
        rounds: u32,
        mut work: impl FnMut(C, u32) -> Result<()>,
    ) -> Result<()> {
        for Turn { case, round, what } in turns(cases, rounds) {
            self.run(case.name(), &what, || work(case, round))?;
        }
        Ok(())
    }
}

/// The turn of a case in a round.
#[derive(Debug)]
pub struct Turn<C> {
    /// The case.
    pub case: C,
    /// Number of the round, from 1.
    pub round: u32,
    /// The same for people: `round 1 of 5`.
    pub what: String,
}

/// The turns of all cases in a number of rounds.
pub fn turns<C: Copy>(cases: &[C], rounds: u32) -> impl Iterator<Item = Turn<C>> {
    (1..=rounds).flat_map(move |round| {
        let cases = rotated(cases, round).into_iter();
        cases.map(move |case| Turn {
            case,
            round,
            what: format!("round {round} of {rounds}"),
        })
    })
}

/// The same cases, rotated so that each round starts with another.
fn rotated<T: Clone>(cases: &[T], run: u32) -> Vec<T> {
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
