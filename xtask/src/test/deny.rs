//! `cargo deny`: licences, banned and duplicate crates, sources, and advisories if their database can be reached.

use super::stages::Stage;
use super::unit::cargo;
use crate::checkout;
use crate::progress::{Progress, ends_with_this_process};
use anyhow::Result;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Runs every check of `deny.toml`. Each counts as one test; advisories count as skipped without their database.
pub fn check(stage: &mut Stage, progress: &Progress) -> Result<()> {
    let program = program(progress)?;
    for check in ["licenses", "bans", "sources"] {
        count(stage, check, deny(&program).args(["check", check]))?;
    }
    if !stage
        .command(deny(&program).arg("fetch").stderr(Stdio::null()))?
        .success()
    {
        println!("skipped cargo deny check advisories: their database cannot be reached");
        stage.tally.skipped += 1;
        return Ok(());
    }
    let words = ["check", "--disable-fetch", "advisories"];
    count(stage, "advisories", deny(&program).args(words))
}

/// Runs a check, which counts as one test.
fn count(stage: &mut Stage, check: &str, command: &mut Command) -> Result<()> {
    let status = stage.command(command)?;
    match status.success() {
        true => stage.tally.passed += 1,
        false => stage
            .tally
            .fail(&format!("cargo deny check {check}"), &status.to_string()),
    }
    Ok(())
}

fn deny(program: &PathBuf) -> Command {
    let mut command = Command::new(program);
    command.current_dir(checkout::root()).stdin(Stdio::null());
    ends_with_this_process(&mut command);
    command
}

/// Path of `cargo-deny`: the one on PATH, or one installed in the cache.
fn program(progress: &Progress) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if let Some(found) = std::env::split_paths(&path)
        .map(|folder| folder.join("cargo-deny"))
        .find(|program| program.is_file())
    {
        return Ok(found);
    }
    let root = checkout::cache()?.join("tools");
    let program = root.join("bin/cargo-deny");
    if !program.is_file() {
        let mut install = cargo(&["install", "--quiet", "--locked", "cargo-deny", "--root"]);
        install
            .arg(&root)
            .env("CARGO_TARGET_DIR", checkout::target().join("tools"));
        progress.run("installing cargo-deny", &mut install)?;
    }
    Ok(program)
}
