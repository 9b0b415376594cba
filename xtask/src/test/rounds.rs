//! Results of tests with random seeds, which accumulate over runs in `target/rounds/`.

use crate::checkout;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Result of one round, a line of `target/rounds/CASE.jsonl`.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    pub seed: u32,
    /// Commit of the checkout, with `+` if files are modified.
    pub commit: String,
    /// `passed`, `failed`, `skipped` or `not run`.
    pub outcome: String,
    /// Start time, as in RFC 3339.
    pub started: String,
    pub seconds: f64,
    /// Number of kills, for a case that kills processes. A process may have ended before its kill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kills: Option<u32>,
    /// Number of inputs, for a fuzz target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub executions: Option<u64>,
    /// Number of edges that the inputs covered, for a fuzz target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<u32>,
}

/// Appends `round` to the file of `case`.
pub fn record(case: &str, round: &Round) -> Result<()> {
    append(&folder()?.join(format!("{case}.jsonl")), round)
}

/// Time that all rounds of `case` took.
pub fn time_spent(case: &str) -> Result<Duration> {
    time_spent_in(&folder()?, case)
}

fn time_spent_in(folder: &Path, case: &str) -> Result<Duration> {
    let path = folder.join(format!("{case}.jsonl"));
    let rounds = if path.exists() { read(&path)? } else { Vec::new() };
    let seconds = rounds.iter().map(|round| round.seconds).sum();
    Ok(Duration::try_from_secs_f64(seconds)?)
}

/// One line for each case that has recorded rounds: the number that passed and failed, the total of kills
/// and of inputs, and hours.
pub fn totals() -> Result<String> {
    totals_of(&folder()?)
}

fn folder() -> Result<PathBuf> {
    checkout::folder(checkout::target().join("rounds"))
}

fn append(path: &Path, round: &Round) -> Result<()> {
    let mut line = serde_json::to_string(round)?;
    line.push('\n');
    std::fs::File::options()
        .create(true)
        .append(true)
        .open(path)
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn read(path: &Path) -> Result<Vec<Round>> {
    let text = std::fs::read_to_string(path)?;
    let rounds = text.lines().map(serde_json::from_str);
    rounds
        .collect::<Result<_, _>>()
        .with_context(|| format!("{} is damaged", path.display()))
}

fn totals_of(folder: &Path) -> Result<String> {
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
        let rounds = read(file)?;
        let count = |outcome: &str| rounds.iter().filter(|round| round.outcome == outcome).count();
        let seconds: f64 = rounds.iter().map(|round| round.seconds).sum();
        let kills = match rounds.iter().filter_map(|round| round.kills).sum::<u32>() {
            0 => String::new(),
            kills => format!("{kills} kills, "),
        };
        let inputs = match rounds.iter().filter_map(|round| round.executions).sum::<u64>() {
            0 => String::new(),
            inputs => format!("{inputs} inputs, "),
        };
        text.push_str(&format!(
            "{}: {} rounds, {} passed, {} failed, {kills}{inputs}{:.1} h\n",
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
pub fn commit() -> Result<String> {
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
                ..Round::default()
            };
            append(&path, &round).expect("written");
        }
        let text = std::fs::read_to_string(&path).expect("read");
        assert_eq!(
            text.lines().next(),
            Some(
                r#"{"seed":7,"commit":"0123456789ab","outcome":"passed","started":"2026-01-02T03:04:05Z","seconds":1800.0}"#
            )
        );
        assert_eq!(
            totals_of(folder.path()).expect("read"),
            "soak-raw: 3 rounds, 2 passed, 1 failed, 1.5 h\n"
        );
        let spent = |case| time_spent_in(folder.path(), case).expect("read");
        assert_eq!(spent("soak-raw"), Duration::from_secs(5400));
        assert_eq!(spent("never"), Duration::ZERO);
        let kills = Round {
            outcome: "passed".to_owned(),
            kills: Some(40),
            ..Round::default()
        };
        for _ in 0..2 {
            append(&folder.path().join("kills.jsonl"), &kills).expect("written");
        }
        let totals = totals_of(folder.path()).expect("read");
        assert_eq!(
            totals.lines().next(),
            Some("kills: 2 rounds, 2 passed, 0 failed, 80 kills, 0.0 h")
        );
    }
}
