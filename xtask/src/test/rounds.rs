//! Results of tests with random seeds, which accumulate over runs in `target/rounds/`. Those of the fuzz targets are moved
//! to `fuzz/rounds/`, which is under version control.

use crate::checkout;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Result of one round, a line of `CASE.jsonl`.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    pub seed: u32,
    /// Commit of the checkout, with `+` if files are modified.
    pub commit: String,
    /// `passed`, `failed`, `skipped` or `not run`; `loaded` if a fuzz target has only loaded its corpus.
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
    append(&file(&folder()?, case), std::slice::from_ref(round))
}

/// Moves the rounds of a fuzz target to the folder under version control.
pub fn store(case: &str) -> Result<()> {
    store_in(&folder()?, &stored()?, case)
}

fn store_in(folder: &Path, stored: &Path, case: &str) -> Result<()> {
    let new = file(folder, case);
    let rounds = read(&new)?;
    if rounds.is_empty() {
        return Ok(());
    }
    append(&file(stored, case), &rounds)?;
    std::fs::remove_file(&new).with_context(|| format!("cannot remove {}", new.display()))
}

/// Time that all rounds of `case` took, but those in which a fuzz target has only loaded its corpus.
pub fn time_spent(case: &str) -> Result<Duration> {
    time_spent_in(&[folder()?, stored()?], case)
}

fn time_spent_in(folders: &[PathBuf], case: &str) -> Result<Duration> {
    let rounds = read_all(folders, case)?;
    let worked = rounds.iter().filter(|round| round.outcome != "loaded");
    let seconds = worked.map(|round| round.seconds).sum();
    Ok(Duration::try_from_secs_f64(seconds)?)
}

/// One line for each case that has recorded rounds: the number that passed and failed, the total of kills
/// and of inputs, and hours.
pub fn totals() -> Result<String> {
    totals_of(&[folder()?, stored()?])
}

fn folder() -> Result<PathBuf> {
    checkout::folder(checkout::target().join("rounds"))
}

fn stored() -> Result<PathBuf> {
    checkout::folder(checkout::root().join("fuzz/rounds"))
}

fn file(folder: &Path, case: &str) -> PathBuf {
    folder.join(format!("{case}.jsonl"))
}

fn append(path: &Path, rounds: &[Round]) -> Result<()> {
    let mut lines = String::new();
    for round in rounds {
        lines.push_str(&serde_json::to_string(round)?);
        lines.push('\n');
    }
    std::fs::File::options()
        .create(true)
        .append(true)
        .open(path)
        .and_then(|mut file| file.write_all(lines.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// The rounds of `case` in all `folders`.
fn read_all(folders: &[PathBuf], case: &str) -> Result<Vec<Round>> {
    let mut rounds = Vec::new();
    for folder in folders {
        rounds.extend(read(&file(folder, case))?);
    }
    Ok(rounds)
}

/// The rounds in a file; none if it does not exist.
fn read(path: &Path) -> Result<Vec<Round>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(path)?;
    let rounds = text.lines().map(serde_json::from_str);
    rounds
        .collect::<Result<_, _>>()
        .with_context(|| format!("{} is damaged", path.display()))
}

fn totals_of(folders: &[PathBuf]) -> Result<String> {
    let mut cases = BTreeSet::new();
    for folder in folders {
        let files = std::fs::read_dir(folder)?.flatten();
        cases.extend(
            files.filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".jsonl")?.to_owned())),
        );
    }
    let mut text = String::new();
    for case in cases {
        let mut rounds = read_all(folders, &case)?;
        rounds.retain(|round| round.outcome != "loaded");
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
            "{case}: {} rounds, {} passed, {} failed, {kills}{inputs}{:.1} h\n",
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
        for (seed, outcome) in [(7, "passed"), (8, "failed"), (9, "passed"), (10, "loaded")] {
            let round = Round {
                seed,
                commit: "0123456789ab".to_owned(),
                outcome: outcome.to_owned(),
                started: "2026-01-02T03:04:05Z".to_owned(),
                seconds: 1800.0,
                ..Round::default()
            };
            append(&path, &[round]).expect("written");
        }
        let text = std::fs::read_to_string(&path).expect("read");
        assert_eq!(
            text.lines().next(),
            Some(
                r#"{"seed":7,"commit":"0123456789ab","outcome":"passed","started":"2026-01-02T03:04:05Z","seconds":1800.0}"#
            )
        );
        let folders = [folder.path().to_owned()];
        assert_eq!(
            totals_of(&folders).expect("read"),
            "soak-raw: 3 rounds, 2 passed, 1 failed, 1.5 h\n"
        );
        let spent = |case| time_spent_in(&folders, case).expect("read");
        assert_eq!(spent("soak-raw"), Duration::from_secs(5400));
        assert_eq!(spent("never"), Duration::ZERO);
        let kills = Round {
            outcome: "passed".to_owned(),
            kills: Some(40),
            ..Round::default()
        };
        for _ in 0..2 {
            append(&folder.path().join("kills.jsonl"), std::slice::from_ref(&kills)).expect("written");
        }
        let totals = totals_of(&folders).expect("read");
        assert_eq!(
            totals.lines().next(),
            Some("kills: 2 rounds, 2 passed, 0 failed, 80 kills, 0.0 h")
        );
    }

    #[test]
    fn stored_rounds_count_with_later_ones() {
        let [new, stored] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        let folders = [new.path().to_owned(), stored.path().to_owned()];
        let round = Round {
            outcome: "passed".to_owned(),
            seconds: 60.0,
            ..Round::default()
        };
        for total in [60, 120] {
            append(&file(new.path(), "fuzz-blk"), std::slice::from_ref(&round)).expect("written");
            store_in(new.path(), stored.path(), "fuzz-blk").expect("stored");
            let spent = time_spent_in(&folders, "fuzz-blk").expect("read");
            assert_eq!(spent, Duration::from_secs(total));
        }
        append(&file(new.path(), "fuzz-blk"), &[round]).expect("written");
        let totals = totals_of(&folders).expect("read");
        assert_eq!(totals, "fuzz-blk: 3 rounds, 3 passed, 0 failed, 0.1 h\n");
        // A target that has not run has nothing to store.
        store_in(new.path(), stored.path(), "fuzz-scsi").expect("nothing to do");
        assert!(!file(stored.path(), "fuzz-scsi").exists());
    }
}
