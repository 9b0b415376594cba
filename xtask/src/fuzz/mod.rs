//! `cargo xtask fuzz`: builds the targets of `fuzz/` with coverage and runs each for some time.
//!
//! The stable compiler instruments them as cargo-fuzz does, without a sanitizer. Each target writes to a corpus in
//! `target/fuzz/corpus`, which later runs go on with, and starts from the inputs in `fuzz/corpus`. It can write nowhere else
//! (`confinement.rs`).

mod build;
mod confinement;
mod corpus;
mod libfuzzer;
mod planted;

use crate::checkout;
use crate::exit_code;
use crate::progress::Progress;
use crate::test::{Round, commit, record, store, time_spent};
use anyhow::{Context, Result, bail};
use libfuzzer::{Finding, Outcome};
use std::num::NonZero;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Arguments of `cargo xtask fuzz`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Seconds for each target
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u32,
    /// Targets at the same time [default: one for each processor]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZero<usize>>,
    /// Seed of libFuzzer [default: the time]
    #[arg(long, value_name = "S")]
    seed: Option<u32>,
    /// Add AddressSanitizer, which needs a nightly toolchain
    #[arg(long)]
    sanitizer: bool,
    /// Run only this input, with the one target that is named
    #[arg(long, value_name = "FILE", requires = "filter")]
    input: Option<PathBuf>,
    /// Keep only the inputs that are needed for the coverage, store some of them in fuzz/corpus, move the log of rounds to
    /// fuzz/rounds, and fuzz nothing
    #[arg(long, conflicts_with = "input")]
    minimise: bool,
    /// Plant bugs, one at a time, and run the target of each until it has found the bug
    #[arg(long, conflicts_with_all = ["input", "minimise"])]
    planted: bool,
    /// List the targets and run nothing
    #[arg(long)]
    list: bool,
    /// Run only the targets whose name contains this
    #[arg(value_name = "TARGET")]
    filter: Option<String>,
}

/// Runs `cargo xtask fuzz`; fails if a target found something.
pub fn run(args: &Args) -> Result<ExitCode> {
    let targets = targets(args.filter.as_deref())?;
    if args.list {
        targets.iter().for_each(|target| println!("{target}"));
        return Ok(ExitCode::SUCCESS);
    }
    let seed = args
        .seed
        .unwrap_or_else(|| jiff::Timestamp::now().subsec_nanosecond().unsigned_abs());
    if args.planted {
        let found = planted::find(&targets, seed, &Progress::on_stderr())?;
        return Ok(exit_code(found));
    }
    let folder = build::build(&targets, args.sanitizer, &Progress::on_stderr())?;
    if let Some(input) = &args.input {
        let [target] = &targets[..] else {
            bail!(
                "--input needs one target, and these match: {}",
                targets.join(", ")
            );
        };
        return libfuzzer::repeat(&folder.join(target), input);
    }
    if args.minimise {
        for target in &targets {
            println!("{target}: {}", corpus::minimise(&folder.join(target), target)?);
            store(&round_name(target))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let jobs = args.jobs.map_or_else(
        || thread::available_parallelism().map_or(1, NonZero::get),
        NonZero::get,
    );
    let targets = least_fuzzed_first(targets)?;
    let findings = fuzz(&folder, &targets, args.seconds, jobs, seed)?;
    println!(
        "{} of {} targets ran without a finding",
        targets.len() - findings.len(),
        targets.len()
    );
    for finding in &findings {
        println!("{finding}");
    }
    Ok(exit_code(findings.is_empty()))
}

/// Runs every target for `seconds`. Returns the number of targets, and a description of each finding.
pub fn run_all(seconds: u32, progress: &Progress) -> Result<(usize, Vec<Finding>)> {
    let targets = targets(None)?;
    let folder = build::build(&targets, false, progress)?;
    let findings = fuzz(&folder, &targets, seconds, 1, 1)?;
    Ok((targets.len(), findings))
}

/// Names of the targets that contain `filter`, in alphabetical order.
fn targets(filter: Option<&str>) -> Result<Vec<String>> {
    let folder = checkout::root().join("fuzz/fuzz_targets");
    let mut targets: Vec<String> = std::fs::read_dir(&folder)
        .with_context(|| folder.display().to_string())?
        .flatten()
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".rs")?.to_owned()))
        .filter(|name| filter.is_none_or(|filter| name.contains(filter)))
        .collect();
    targets.sort();
    // One that is named in full is meant alone.
    if let Some(exact) = targets.iter().find(|name| Some(name.as_str()) == filter) {
        targets = vec![exact.clone()];
    }
    if targets.is_empty() {
        bail!("no target of that name: see cargo xtask fuzz --list");
    }
    Ok(targets)
}

/// `targets` in the order of the time that they have had in all rounds so far.
fn least_fuzzed_first(targets: Vec<String>) -> Result<Vec<String>> {
    let mut timed: Vec<_> = targets
        .into_iter()
        .map(|target| Ok((time_spent(&round_name(&target))?, target)))
        .collect::<Result<_>>()?;
    timed.sort();
    Ok(timed.into_iter().map(|(_, target)| target).collect())
}

/// Runs `targets`, `jobs` at a time, and records a round of each.
fn fuzz(
    folder: &std::path::Path,
    targets: &[String],
    seconds: u32,
    jobs: usize,
    seed: u32,
) -> Result<Vec<Finding>> {
    let commit = commit()?;
    let queue = Mutex::new(targets.iter());
    let work = || -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        loop {
            let target = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(target) = target else {
                return Ok(findings);
            };
            let started = jiff::Timestamp::now();
            let corpus = corpus::working(target)?;
            let outcome = libfuzzer::run(&folder.join(target), target, &corpus, seconds, seed)?;
            println!("{target}: {outcome}");
            record(&round_name(target), &round(&outcome, seed, &commit, started))?;
            findings.extend(outcome.finding);
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        let mut findings = Vec::new();
        for worker in workers {
            findings.extend(
                worker
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?,
            );
        }
        Ok(findings)
    })
}

/// Name of a target in the log of rounds.
fn round_name(target: &str) -> String {
    format!("fuzz-{target}")
}

fn round(outcome: &Outcome, seed: u32, commit: &str, started: jiff::Timestamp) -> Round {
    let text = match &outcome.finding {
        Some(_) => "failed",
        // It is no time of fuzzing.
        None if outcome.executions == 0 => "loaded",
        None => "passed",
    };
    Round {
        seed,
        commit: commit.to_owned(),
        outcome: text.to_owned(),
        started: started.to_string(),
        seconds: outcome.seconds,
        executions: Some(outcome.executions),
        coverage: Some(outcome.coverage),
        ..Round::default()
    }
}
