//! Measurements whose clock counts instructions: one machine for each run of a case.

use crate::bench_files::HUSK_PROGRAMS;
use crate::host;
use crate::message::Message;
use crate::peers::Peers;
use crate::record::{Measurement, Record};
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};
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

/// A run of a case, in a machine of its own.
#[derive(Debug)]
pub struct Run {
    /// Name of the case.
    pub case: &'static str,
    /// Number of the round, from 1.
    pub round: u32,
    /// Shell command of the machine. It writes a benchmark's messages to its standard output.
    pub command: String,
}

/// Path of a file of this machine in a counted machine that has it.
pub fn there(file: &Path) -> PathBuf {
    Path::new(FILES).join(file.file_name().unwrap_or_default())
}

/// The command that measures a `plan` of benchmark `bench` in a machine that has `this` program.
pub fn command(this: &Path, bench: &str, plan: &impl Serialize) -> Result<String> {
    Ok(format!(
        "{} {bench} --inside '{}'",
        there(this).display(),
        serde_json::to_string(plan)?
    ))
}

/// The files that a machine needs: `this` program, Husk's and `programs` of the folder `release`, kernel and initrd,
/// and peers.
pub fn files(
    this: &Path,
    (release, programs): (&Path, &[&str]),
    guest: [&Path; 2],
    peers: &Peers,
) -> Vec<PathBuf> {
    let programs = HUSK_PROGRAMS
        .iter()
        .chain(programs)
        .map(|program| release.join(program));
    let own = [this.to_owned()].into_iter().chain(programs);
    let guest = guest.map(Path::to_owned);
    own.chain(guest).chain(peers.programs()).collect()
}

/// The runs of all `cases` with all `loads`, round after round.
pub fn runs<C: Copy, L: Copy>(
    rounds: u32,
    cases: &[C],
    loads: &[L],
    run: impl Fn(u32, C, L) -> Result<Run>,
) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    for round in 1..=rounds {
        for load in loads {
            for case in cases {
                runs.push(run(round, *case, *load)?);
            }
        }
    }
    Ok(runs)
}

/// Does all `runs`, several at a time. Values are added to `record`, also if the measurement ends early.
pub fn measure(
    progress: &Progress,
    machine: &CountedMachine,
    runs: Vec<Run>,
    record: &mut Record,
) -> Result<()> {
    record.env.insert("load_before".to_owned(), json!(host::load()));
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
    record.env.insert(
        "where".to_owned(),
        json!("a machine whose clock counts instructions"),
    );
    record.env.insert("load_after".to_owned(), json!(host::load()));
    record.env.insert("complete".to_owned(), json!(measured.is_ok()));
    measured?;
    step.done();
    Ok(())
}

type Facts = BTreeMap<String, Value>;

/// Does a run with one seed after the other until it succeeds.
fn attempt(machine: &CountedMachine, run: &Run, step: &Step) -> Result<(Vec<Measurement>, Facts)> {
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
