//! Runs commands until they end.

use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::process::{Command, Output};

/// Runs `command` until it ends; returns its output.
///
/// # Errors
/// If it fails, with its output and errors.
pub fn finish(command: &mut Command) -> Result<String> {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .output()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if !status.success() {
        let words = [command.get_program()].into_iter().chain(command.get_args());
        let words: Vec<_> = words.take(7).map(OsStr::to_string_lossy).collect();
        bail!(
            "{} …: {status}: {}{}",
            words.join(" "),
            text(&stdout),
            text(&stderr).trim_end()
        );
    }
    Ok(text(&stdout))
}
