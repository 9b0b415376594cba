//! `cargo xtask soak`: tests that take from minutes to hours, in rounds that accumulate over runs.

use super::queue;
use super::stages::{Stage, Stages};
use super::suite::{Suite, Tier};
use crate::binaries::Profile;
use crate::progress::Progress;
use crate::{binaries, checkout, images};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// Environment variable that gives a case its seed.
const SEED: &str = "HUSK_FIO_SEED";

/// Arguments of `cargo xtask soak`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of each case; each has a seed of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    rounds: u32,
    /// Seed of the first round; each further round adds one [default: the time]
    #[arg(long, value_name = "S")]
    seed: Option<u32>,
    /// Print the totals of all recorded rounds and run nothing
    #[arg(long)]
    totals: bool,
    /// Run only cases whose name contains this
    filter: Option<String>,
}

/// Result of one round, a line of `target/rounds/CASE.jsonl`.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Round {
    seed: u32,
    /// Commit of the checkout, with `+` if files are modified.
    commit: String,
    /// `passed`, `failed`, `skipped` or `not run`.
    outcome: String,
    /// Start time, as in RFC 3339.
    started: String,
    seconds: f64,
}

/// Runs `cargo xtask soak`.
pub fn run(args: &Args) -> Result<ExitCode> {
    let folder = checkout::folder(checkout::target().join("rounds"))?;
    if args.totals {
        print!("{}", totals(&folder)?);
        return Ok(ExitCode::SUCCESS);
    }
    crate::lab::exit_on_signals()?;
    let progress = Progress::new();
    binaries::build(Profile::Release, &progress)?;
    images::ensure_all(&progress)?;
    let stages = Stages::new();
    stages.run("soak", |stage| rounds(stage, args, &folder, &progress));
    print!("{}", totals(&folder)?);
    let good = stages.close();
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn rounds(stage: &mut Stage, args: &Args, folder: &Path, progress: &Progress) -> Result<()> {
    let suite = Suite::copy(Profile::Release)?;
    let cases = suite.cases(&[Tier::Long], args.filter.as_deref())?;
    if cases.is_empty() {
        bail!("no case of that name");
    }
    let commit = commit()?;
    let first = args
        .seed
        .unwrap_or_else(|| jiff::Timestamp::now().subsec_nanosecond().unsigned_abs());
    for number in 0..args.rounds {
        let seed = first.wrapping_add(number);
        for case in &cases {
            println!(
                "{}: round {} of {}, seed {seed}",
                case.name,
                number + 1,
                args.rounds
            );
            let (started, clock) = (jiff::Timestamp::now(), Instant::now());
            let env = [(SEED.to_owned(), seed.to_string())];
            let result = queue::run(&suite, vec![case.clone()], &env, Duration::MAX, progress);
            let outcome = match &result {
                Ok((tally, _)) if tally.failed > 0 => "failed",
                Ok((tally, _)) if tally.passed > 0 => "passed",
                Ok(_) => "skipped",
                Err(_) => "not run",
            };
            let round = Round {
                seed,
                commit: commit.clone(),
                outcome: outcome.to_owned(),
                started: started.to_string(),
                seconds: clock.elapsed().as_secs_f64(),
            };
            record(&folder.join(format!("{}.jsonl", case.name)), &round)?;
            let (tally, cpu) = result?;
            stage.tally.add(tally);
            stage.cpu += cpu;
        }
    }
    Ok(())
}

/// Appends `round` to the file `path`.
fn record(path: &Path, round: &Round) -> Result<()> {
    let mut line = serde_json::to_string(round)?;
    line.push('\n');
    std::fs::File::options()
        .create(true)
        .append(true)
        .open(path)
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// One line for each case that has recorded rounds: the number that passed and failed, and the total hours.
fn totals(folder: &Path) -> Result<String> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    files.sort();
    let mut text = String::new();
    for file in files
        .iter()
        .filter(|file| file.extension().is_some_and(|end| end == "jsonl"))
    {
        let rounds: Vec<Round> = std::fs::read_to_string(file)?
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()
            .with_context(|| format!("{} is damaged", file.display()))?;
        let count = |outcome: &str| rounds.iter().filter(|round| round.outcome == outcome).count();
        let seconds: f64 = rounds.iter().map(|round| round.seconds).sum();
        text.push_str(&format!(
            "{}: {} rounds, {} passed, {} failed, {:.1} h\n",
            file.file_stem().unwrap_or_default().to_string_lossy(),
            rounds.len(),
            count("passed"),
            count("failed"),
            seconds / 3600.0
        ));
    }
    Ok(text)
}

/// The commit that is checked out, with `+` if files are modified.
fn commit() -> Result<String> {
    let git = |arguments: &[&str]| -> Result<String> {
        let output = Command::new("git")
            .args(arguments)
            .current_dir(checkout::root())
            .output()
            .context("cannot start git")?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Ok(git(&["rev-parse", "--short=12", "HEAD"])? + if changed { "+" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_add_up_over_runs() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("soak-raw.jsonl");
        for (seed, outcome) in [(7, "passed"), (8, "failed"), (9, "passed")] {
            let round = Round {
                seed,
                commit: "0123456789ab".to_owned(),
                outcome: outcome.to_owned(),
                started: "2026-01-02T03:04:05Z".to_owned(),
                seconds: 1800.0,
            };
            record(&path, &round).expect("written");
        }
        let text = std::fs::read_to_string(&path).expect("read");
        assert_eq!(
            text.lines().next(),
            Some(
                r#"{"seed":7,"commit":"0123456789ab","outcome":"passed","started":"2026-01-02T03:04:05Z","seconds":1800.0}"#
            )
        );
        assert_eq!(
            totals(folder.path()).expect("read"),
            "soak-raw: 3 rounds, 2 passed, 1 failed, 1.5 h\n"
        );
    }
}
