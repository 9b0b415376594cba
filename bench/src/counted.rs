//! Measurements whose clock counts instructions: one machine for each run of a case.

use crate::bench_files::{Sources, moved};
use crate::cases::BenchCase;
use crate::message::Message;
use crate::record::{Measurement, Record};
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{iter, thread};
use xtask::lab::{
    self,
    counted::{CountedMachine, FILES},
};
use xtask::progress::{Progress, Step};

/// Maximum processor time of a run; one that takes more counts as hung. Most take less than half of it.
const LIMIT: Duration = Duration::from_secs(240);
/// Seeds with which a run is tried.
const SEEDS: u32 = 10;

/// A benchmark to measure in machines whose clock counts instructions.
#[derive(Debug)]
pub struct CountedJob<P> {
    /// Name of the benchmark.
    pub bench: &'static str,
    /// Files that a machine needs, besides this program.
    pub files: Vec<PathBuf>,
    /// Adds to the machine what only some benchmarks need.
    pub system: fn(CountedMachine) -> Result<CountedMachine>,
    /// Number of machines for each plan.
    pub rounds: u32,
    /// Plans of one machine, each with the name of its case.
    pub plans: Vec<(&'static str, P)>,
}

/// A run of a case, in a machine of its own.
struct Run<'a> {
    case: &'a str,
    /// Number of the round, from 1.
    round: u32,
    /// Shell command of the machine. It writes a benchmark's messages to its standard output.
    command: String,
}

/// Path of a file of this machine in a counted machine that has it.
pub fn there(file: &Path) -> PathBuf {
    moved(file, Path::new(FILES))
}

impl Sources {
    /// The same files in a counted machine that has them.
    pub fn counted(&self) -> Self {
        self.within(Path::new(FILES))
    }
}

/// Plans for all `cases` with all `loads`, each with the name of its case.
pub fn plans<C: BenchCase, L: Copy, P>(
    cases: &[C],
    loads: &[L],
    plan: impl Fn(C, L) -> P,
) -> Vec<(&'static str, P)> {
    let mut plans = Vec::new();
    for load in loads {
        plans.extend(cases.iter().map(|case| (case.name(), plan(*case, *load))));
    }
    plans
}

impl<P: Serialize> CountedJob<P> {
    /// Measures all plans, round after round and several at a time. Values are added to `record`, also if the
    /// measurement ends early.
    pub fn measure(&self, progress: &Progress, record: &mut Record) -> Result<()> {
        let this = std::env::current_exe()?;
        let mut files = vec![this.as_path()];
        files.extend(self.files.iter().map(PathBuf::as_path));
        let machine = (self.system)(CountedMachine::new(progress, &files)?)?;
        let mut runs = Vec::new();
        for round in 1..=self.rounds {
            for (case, plan) in &self.plans {
                let plan = serde_json::to_string(plan)?;
                let command = format!("{} inside {} '{plan}'", there(&this).display(), self.bench);
                runs.push(Run { case, round, command });
            }
        }
        record.measure("a machine whose clock counts instructions", |record| {
            measure(progress, &machine, runs, record)
        })
    }
}

/// Does all `runs`.
fn measure(
    progress: &Progress,
    machine: &CountedMachine,
    runs: Vec<Run<'_>>,
    record: &mut Record,
) -> Result<()> {
    let step = progress.step("measuring");
    let queue = Mutex::new(runs.into_iter());
    let found = Mutex::new((Vec::new(), BTreeMap::new()));
    let work = || -> Result<()> {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(run) = next else { return Ok(()) };
            step.news(&format!("{}: round {}", run.case, run.round));
            let (measurements, facts) = attempt(machine, &run, &step)?;
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.0.extend(measurements);
            found.1.extend(facts);
        }
    };
    let measured = thread::scope(|scope| {
        let workers: Vec<_> = iter::repeat_with(|| scope.spawn(work))
            .take(lab::affordable() as usize)
            .collect();
        let ends = workers.into_iter().map(|worker| {
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        ends.collect::<Vec<_>>().into_iter().collect::<Result<()>>()
    });
    let (measurements, facts) = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    record.measurements.extend(measurements);
    record.env.extend(facts);
    measured?;
    step.done();
    Ok(())
}

type Facts = BTreeMap<String, Value>;

/// Does a run with one seed after the other until it succeeds.
fn attempt(machine: &CountedMachine, run: &Run<'_>, step: &Step) -> Result<(Vec<Measurement>, Facts)> {
    let mut failed = None;
    for attempt in 0..SEEDS {
        match machine.run(&run.command, run.round + attempt * 1000, LIMIT) {
            Ok(said) => return Ok(parse(&said, run.round)),
            Err(error) => {
                step.say(&format!(
                    "failed, done again: {} in round {}: {error:#}",
                    run.case, run.round
                ));
                failed = Some(error);
            }
        }
    }
    let what = || format!("{}: round {}, {SEEDS} times", run.case, run.round);
    Err(failed.unwrap_or_else(|| anyhow::anyhow!("no run"))).with_context(what)
}

/// The measured values and the facts in what a run wrote.
fn parse(said: &str, round: u32) -> (Vec<Measurement>, Facts) {
    let mut measurements = Vec::new();
    let mut facts = Facts::new();
    for line in said.lines() {
        match serde_json::from_str(line) {
            Ok(Message::<Value>::Measured(measurement)) => measurements.push(Measurement {
                run: round,
                ..measurement
            }),
            Ok(Message::Env(found)) => facts.extend(found),
            _ => {}
        }
    }
    (measurements, facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_between_other_lines() {
        let value = r#"{"Measured":{"bench":"boot","case":"husk","metric":"end_ms","unit":"ms","value":3.5,"run":1}}"#;
        let said = format!("[ 1.0] kvm: x\n{value}\n{{\"News\":\"a\"}}\n{{\"Env\":{{\"a\":1}}}}\n");
        let (measurements, facts) = parse(&said, 7);
        assert_eq!(measurements.len(), 1);
        assert_eq!((measurements[0].value, measurements[0].run), (3.5, 7));
        assert_eq!(facts["a"], 1);
    }
}
