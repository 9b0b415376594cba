//! Boots whose clock counts instructions: one machine for each boot.

use super::case::{FLOOR_PROGRAM, Vmm};
use super::inside::Plan;
use crate::host;
use crate::message::Message;
use crate::record::{Measurement, Record};
use anyhow::{Context, Result};
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

/// Time without a message after which a run hangs: a boot of a guest takes half a minute.
const HUNG: Duration = Duration::from_secs(90);
/// Seeds with which a run is tried.
const SEEDS: u32 = 6;

/// Measures each case of `plan` in `plan.runs` machines, several at a time.
pub fn measure(progress: &Progress, plan: Plan, record: &mut Record) -> Result<()> {
    let this = std::env::current_exe()?;
    let files = files(&plan, &this);
    let machine = CountedMachine::new(progress, &files.iter().map(PathBuf::as_path).collect::<Vec<_>>())?;
    record.env.insert("load_before".to_owned(), json!(host::load()));
    let step = progress.step("measuring");
    let runs = (1..=plan.runs).flat_map(|run| plan.cases.iter().map(move |case| (run, *case)));
    let queue = Mutex::new(runs);
    let found = Mutex::new((Vec::new(), BTreeMap::new()));
    let work = || -> Result<()> {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((run, case)) = next else { return Ok(()) };
            step.news(&format!("{}: round {run} of {}", case.name(), plan.runs));
            let command = command(&plan, case, &this)?;
            let (measurements, facts) = attempt(&machine, &command, (case, run), &step)?;
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

/// The files that a machine needs.
fn files(plan: &Plan, this: &Path) -> Vec<PathBuf> {
    let mut files = vec![
        this.to_owned(),
        plan.release.join("husk"),
        plan.release.join("husk-vmm"),
        plan.kernel.clone(),
        plan.initrd.clone(),
    ];
    if plan.cases.contains(&Vmm::Floor) {
        files.push(plan.release.join(FLOOR_PROGRAM));
    }
    files.extend(plan.peers.firecracker.clone());
    files.extend(plan.peers.cloud_hypervisor.clone());
    files
}

/// The command that measures one case in a machine.
fn command(plan: &Plan, case: Vmm, this: &Path) -> Result<String> {
    let there = |file: &Path| -> PathBuf { Path::new(FILES).join(file.file_name().unwrap_or_default()) };
    let mut peers = plan.peers.clone();
    for program in [&mut peers.firecracker, &mut peers.cloud_hypervisor]
        .into_iter()
        .flatten()
    {
        *program = there(program);
    }
    let plan = Plan {
        release: FILES.into(),
        kernel: there(&plan.kernel),
        initrd: there(&plan.initrd),
        disk: PathBuf::new(),
        peers,
        cases: vec![case],
        runs: 1,
        first_line: false,
        observed: 0,
        disk_runs: 0,
        // Guests hang in some machines, so each has one only.
        thorough: false,
    };
    Ok(format!(
        "{} boot --inside '{}'",
        there(this).display(),
        serde_json::to_string(&plan)?
    ))
}

type Facts = BTreeMap<String, Value>;

/// Runs the command with one seed after the other until it succeeds.
fn attempt(
    machine: &CountedMachine,
    command: &str,
    (case, run): (Vmm, u32),
    step: &Step,
) -> Result<(Vec<Measurement>, Facts)> {
    let mut failed = None;
    for attempt in 0..SEEDS {
        match machine.run(command, run + attempt * 1000, HUNG) {
            Ok(said) => return Ok(parse(&said, run)),
            Err(error) => {
                step.say(&format!(
                    "failed, done again: {} in round {run}: {error:#}",
                    case.name()
                ));
                failed = Some(error);
            }
        }
    }
    let what = || format!("{}: round {run}, {SEEDS} times", case.name());
    Err(failed.unwrap_or_else(|| anyhow::anyhow!("no run"))).with_context(what)
}

/// The measured values and the facts in what the command wrote.
fn parse(said: &str, run: u32) -> (Vec<Measurement>, Facts) {
    let mut measurements = Vec::new();
    let mut facts = Facts::new();
    for line in said.lines() {
        match serde_json::from_str(line) {
            Ok(Message::<Value>::Measured(measurement)) => {
                measurements.push(Measurement { run, ..measurement })
            }
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
