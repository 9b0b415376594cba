//! The cluster's processes on this machine, and the record of them.

use crate::lab::{Process, detach};
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Maximum time for a process to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// A process of the cluster.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Daemon {
    /// Name of the program, and of its log.
    pub name: String,
    pub process: Process,
    /// The program and its arguments.
    #[serde(default)]
    command: Vec<String>,
    /// Variables in addition to those of `cargo xtask`.
    #[serde(default)]
    environment: Vec<(String, String)>,
}

impl Daemon {
    /// Starts `command`, whose output is appended to `log`.
    fn start(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let log = File::options().append(true).create(true).open(log)?;
        let text = |word: &OsStr| word.to_string_lossy().into_owned();
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words = words.map(text).collect();
        let set = command
            .get_envs()
            .filter_map(|(name, value)| Some((text(name), text(value?))));
        let environment = set.collect();
        let child = detach(command, &log)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let process = Process::running(i32::try_from(child.id())?);
        let process = process.with_context(|| format!("{name} ended at once"))?;
        std::thread::spawn(move || { child }.wait());
        Ok(Self {
            name: name.to_owned(),
            process,
            command: words,
            environment,
        })
    }
}

/// The record of a cluster's processes.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Record {
    #[serde(skip)]
    folder: PathBuf,
    pub daemons: Vec<Daemon>,
    /// Number of nodes.
    pub nodes: u32,
    /// The cluster was started as a whole.
    ready: bool,
}

impl Record {
    /// The record in `folder`; an empty one if there is none.
    pub fn read(folder: &Path) -> Self {
        let bytes = std::fs::read(folder.join("cluster.json")).unwrap_or_default();
        let record: Self = serde_json::from_slice(&bytes).unwrap_or_default();
        Self {
            folder: folder.to_owned(),
            ..record
        }
    }

    /// Begins the record of a new cluster.
    pub fn begin(&mut self, nodes: u32) -> Result<()> {
        (self.daemons, self.nodes, self.ready) = (Vec::new(), nodes, false);
        self.write()
    }

    /// Records that the cluster was started as a whole.
    pub fn finish(&mut self) -> Result<()> {
        self.ready = true;
        self.write()
    }

    fn write(&self) -> Result<()> {
        // Other commands read it at any time, and a failed write must not destroy the old record.
        let new = self.folder.join("cluster.json.new");
        std::fs::write(&new, serde_json::to_vec_pretty(self)?)?;
        Ok(std::fs::rename(new, self.folder.join("cluster.json"))?)
    }

    /// True if the cluster was started as a whole and its processes run.
    pub fn runs(&self) -> bool {
        self.ready && self.daemons.iter().all(|daemon| daemon.process.alive())
    }

    /// Starts `command`, with its output in `logs/NAME.log`.
    pub fn start(&mut self, name: &str, command: &mut Command) -> Result<()> {
        let daemon = Daemon::start(name, command, &self.log(name))?;
        self.daemons.push(daemon);
        self.write()
    }

    /// Kills the process called `name`, and starts it again.
    pub fn restart(&mut self, name: &str) -> Result<()> {
        let log = self.log(name);
        let names = || self.daemons.iter().map(|daemon| daemon.name.as_str());
        let Some(index) = names().position(|other| other == name) else {
            let names: Vec<&str> = names().collect();
            bail!("no process {name}: there are {}", names.join(", "));
        };
        let daemon = &mut self.daemons[index];
        daemon.process.signal(Signal::KILL);
        daemon.process.ended_within(GRACE);
        let (program, arguments) = daemon.command.split_first().context("no program")?;
        let mut command = Command::new(program);
        command.args(arguments).envs(daemon.environment.iter().cloned());
        *daemon = Daemon::start(name, &mut command, &log)?;
        self.write()
    }

    /// Names of the processes that have ended.
    pub fn ended(&self) -> Vec<String> {
        let ended = self.daemons.iter().filter(|daemon| !daemon.process.alive());
        ended.map(|daemon| daemon.name.clone()).collect()
    }

    /// Fails with the end of its log if the process called `name` has ended.
    pub fn check(&self, name: &str) -> Result<()> {
        let found = self.daemons.iter().find(|daemon| daemon.name == name);
        if found.is_some_and(|daemon| daemon.process.alive()) {
            return Ok(());
        }
        let log = std::fs::read_to_string(self.log(name)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        bail!(
            "{name} has ended:\n{}",
            lines[lines.len().saturating_sub(20)..].join("\n")
        );
    }

    /// Ends one process.
    pub fn end_one(&mut self, name: &str) -> Result<()> {
        let (ended, left) = self.daemons.drain(..).partition(|daemon| daemon.name == name);
        self.daemons = left;
        end(&ended);
        self.write()
    }

    /// Ends all processes.
    pub fn end(&self) {
        end(&self.daemons);
    }

    fn log(&self, name: &str) -> PathBuf {
        self.folder.join("logs").join(format!("{name}.log"))
    }
}

/// Ends processes, the last one first.
fn end(daemons: &[Daemon]) {
    for daemon in daemons.iter().rev() {
        daemon.process.signal(Signal::TERM);
        if !daemon.process.ended_within(GRACE) {
            daemon.process.signal(Signal::KILL);
            daemon.process.ended_within(GRACE);
        }
    }
}
