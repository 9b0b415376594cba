//! One running case, with a separate process, folder, and runtime and scratch directories of Husk.

use super::output_buffer::tail;
use super::program::Session;
use super::{Case, PAUSE, TIMEOUT, met, poll};
use crate::finish::finish;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::cell::Cell;
use std::fmt::Display;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Maximum time of a `husk` command that does not wait for a guest.
const COMMAND: Duration = Duration::from_secs(60);

/// Reason that a case was not run. A case that returns it as its error counts as skipped.
#[derive(Debug)]
pub struct Skip(pub String);

impl Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// Folders and counters of one case.
#[derive(Debug)]
pub struct TestContext {
    folder: PathBuf,
    failed_parts: Cell<u32>,
}

/// Result of a finished command.
#[derive(Debug)]
pub struct CommandResult {
    /// Exit status; 128 + N if signal N ended the command.
    pub status: i32,
    /// Output and errors in the order of arrival.
    pub text: String,
}

impl CommandResult {
    /// The text, if the status is 0.
    pub fn ok(self) -> Result<String> {
        ensure!(self.status == 0, "exit status {}:\n{}", self.status, self.text);
        Ok(self.text)
    }

    /// The text, if the status is `status` and the output does not contain a Rust panic.
    pub fn fails(self, status: i32) -> Result<String> {
        ensure!(
            self.status == status,
            "exit status {} instead of {status}:\n{}",
            self.status,
            self.text
        );
        ensure!(!self.text.contains("panicked at"), "a panic:\n{}", self.text);
        Ok(self.text)
    }

    /// Checks that the status is 0, and that the text contains each of `words`.
    pub fn says(self, words: &[&str]) -> Result<()> {
        expect_contains(&self.ok()?, words)
    }

    /// Checks what [`CommandResult::fails`] does, and that the text contains each of `words`.
    pub fn fails_with(self, status: i32, words: &[&str]) -> Result<()> {
        expect_contains(&self.fails(status)?, words)
    }
}

impl TestContext {
    /// The context in `folder`.
    pub fn at(folder: PathBuf) -> Result<Self> {
        for part in ["run", "scratch", "logs"] {
            let path = folder.join(part);
            std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        Ok(Self {
            folder,
            failed_parts: Cell::new(0),
        })
    }

    /// Runs the case called `name` here and writes the reason, if it fails or is skipped, to files of these names.
    pub fn run_case(&self, cases: &[Case], name: &str) -> Result<bool> {
        let case = cases
            .iter()
            .find(|case| case.name == name)
            .with_context(|| format!("no case {name}"))?;
        let result = (case.run)(self);
        match (result, self.failed_parts.get()) {
            (Ok(()), 0) => return Ok(true),
            (Ok(()), n) => std::fs::write(self.folder.join("reason"), format!("{n} parts failed"))?,
            (Err(error), _) => {
                let file = if error.is::<Skip>() { "skipped" } else { "reason" };
                std::fs::write(self.folder.join(file), format!("{error:#}"))?;
            }
        }
        Ok(false)
    }

    /// Runs one part of the case, with a name and a result. If it fails, the case continues and fails at the end.
    pub fn part(&self, name: &str, part: impl FnOnce() -> Result<()>) {
        let started = Instant::now();
        match part() {
            Ok(()) => println!("part ok {name} {:.1}s", started.elapsed().as_secs_f64()),
            Err(error) => {
                self.failed_parts.set(self.failed_parts.get() + 1);
                println!(
                    "part FAILED {name}: {}",
                    format!("{error:#}").replace('\n', " | ")
                );
            }
        }
    }

    /// A path in the case's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Husk's runtime directory in this case.
    pub fn runtime_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// The log file `name`, whose end is shown if the case fails.
    pub fn log(&self, name: &str) -> PathBuf {
        self.folder.join("logs").join(name)
    }

    /// A `husk` command, with this context's directories.
    pub fn husk<S: AsRef<std::ffi::OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new(program("husk"));
        command
            .arg0("husk")
            .args(arguments)
            .env("HUSK_RUNTIME_DIR", self.runtime_dir())
            .env("HUSK_SCRATCH_DIR", self.path("scratch"))
            .env("HUSK_DATA_DIR", self.path("data"))
            .env("NO_COLOR", "1")
            .current_dir(&self.folder);
        command
    }

    /// Runs a `husk` command until it ends.
    pub fn run<S: AsRef<std::ffi::OsStr>>(&self, arguments: &[S]) -> Result<CommandResult> {
        self.run_within(arguments, COMMAND)
    }

    /// Runs a `husk` command that may take up to `limit`.
    pub fn run_within<S: AsRef<std::ffi::OsStr>>(
        &self,
        arguments: &[S],
        limit: Duration,
    ) -> Result<CommandResult> {
        self.finish(self.husk(arguments), limit)
    }

    /// Runs a program of this machine, which must succeed; returns its output.
    pub fn host<S: AsRef<std::ffi::OsStr>>(&self, words: &[S]) -> Result<String> {
        let (program, arguments) = words.split_first().context("no program")?;
        let mut command = Command::new(program);
        command.args(arguments);
        self.finish(command, TIMEOUT)?.ok()
    }

    /// Runs any command until it ends.
    pub fn finish(&self, command: Command, limit: Duration) -> Result<CommandResult> {
        let words = format!("{command:?}");
        let session = Session::piped(command, &self.log("commands.log"))?;
        session
            .wait(limit)
            .with_context(|| format!("{words} after:\n{}", session.output().all()))
    }

    /// JSON output of a `husk` command.
    pub fn json<S: AsRef<std::ffi::OsStr>>(&self, arguments: &[S]) -> Result<Value> {
        let output = finish(&mut self.husk(arguments))?;
        serde_json::from_str(&output).context("not JSON")
    }

    /// The names in the output of `husk list`.
    pub fn list(&self) -> Result<Vec<String>> {
        let text = self.run(&["list", "-o", "name"])?.ok()?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// Waits until Husk lists no VM and keeps no files of any.
    ///
    /// # Errors
    /// If something is still there after `limit`.
    pub fn nothing_left(&self, limit: Duration) -> Result<()> {
        poll(limit, PAUSE, || {
            let names = self.list()?;
            let files = files_in(&self.runtime_dir());
            met(names.is_empty() && files.is_empty(), || {
                format!(
                    "still there after {} s: VMs {names:?}, files {files:?}",
                    limit.as_secs()
                )
            })
        })
    }

    /// Skips the case, unless this process is root.
    pub fn needs_root(&self) -> Result<()> {
        if rustix::process::geteuid().is_root() {
            Ok(())
        } else {
            Err(Skip("needs root".to_owned()).into())
        }
    }
}

/// Files of VMs in Husk's runtime directory: all but the directory's lock.
pub fn files_in(runtime_dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(runtime_dir).into_iter().flatten().flatten() {
        if entry.file_name() != ".lock" {
            found.push(entry.path());
        }
    }
    found
}

/// The program `name` beside this one, or in the folder of cargo's test programs; else from PATH.
pub fn program(name: &str) -> PathBuf {
    let exe = std::env::current_exe().unwrap_or_default();
    let beside = exe.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    beside
        .into_iter()
        .find(|path| path.is_file())
        .unwrap_or_else(|| name.into())
}

/// The exit status of a process as a shell shows it.
pub fn status(status: std::process::ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}

/// Fails unless `text` contains each of `words`.
pub fn expect_contains(text: &str, words: &[&str]) -> Result<()> {
    for word in words {
        ensure!(
            text.contains(word),
            "{word:?} is not in what ends so:\n{}",
            tail(text, 1000)
        );
    }
    Ok(())
}
