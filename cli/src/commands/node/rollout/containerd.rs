//! The node's own containerd: its program, its configuration, and the settings that it makes of that.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal};

use super::super::CONFIG;
use super::super::containerd_settings::Settings;
use super::{cri, journal::Journal};
use crate::failure::{self, Failure};

/// Directories of programs, in addition to PATH.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Maximum time for containerd to read its configuration.
const DUMP_TIMEOUT: Duration = Duration::from_secs(60);

/// A program of the node.
pub(super) fn command(program: &Path) -> Command {
    let mut path = std::env::var("PATH").unwrap_or_default();
    if !path.is_empty() {
        path.push(':');
    }
    let mut command = Command::new(program);
    command
        .env("PATH", path + PATH)
        // systemctl would do nothing if it took this root directory for a chroot.
        .env("SYSTEMD_IGNORE_CHROOT", "1")
        .stdin(Stdio::null());
    command
}

/// Runs a program to its end, or to the end of `limit`.
pub(super) fn run(mut command: Command, limit: Duration) -> Result<Output, String> {
    let spawned = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let described = |why: &dyn Display| format!("{}: {why}", Path::new(command.get_program()).display());
    let child = spawned.map_err(|error| described(&failure::chain(&error)))?;
    let (ended, end) = mpsc::channel();
    let id = Pid::from_child(&child);
    // It reads both pipes, which block the program when they are full.
    std::thread::spawn(move || ended.send(child.wait_with_output()));
    match end.recv_timeout(limit) {
        Ok(output) => output.map_err(|error| described(&failure::chain(&error))),
        Err(_) => {
            let _ = rustix::process::kill_process(id, Signal::KILL);
            Err(described(&format!("no end after {} s", limit.as_secs())))
        }
    }
}

/// The containerd that serves a socket.
#[derive(Debug)]
pub(super) struct Containerd {
    /// Its process; none if it does not run.
    pub(super) pid: Option<i32>,
    pub(super) program: PathBuf,
    pub(super) config: PathBuf,
}

impl Containerd {
    /// Finds the process that listens on `socket`. If none does, the one that the journal names.
    pub(super) fn find(
        socket: &Path,
        config: Option<&Path>,
        journal: Option<&Journal>,
    ) -> Result<Containerd, Failure> {
        let pid = match (cri::listener(socket), journal) {
            (Ok(pid), _) => pid,
            (Err(_), Some(journal)) => {
                return Ok(Containerd {
                    pid: None,
                    program: journal.program.clone(),
                    config: journal.config.clone(),
                });
            }
            (Err(why), None) => {
                return Err(Failure::Runtime(format!(
                    "{}: {why}: start containerd, or name its socket by --socket",
                    socket.display()
                )));
            }
        };
        let process = PathBuf::from(format!("/proc/{pid}"));
        let program = fs::read_link(process.join("exe"))
            .map_err(Failure::at(format!("{}", process.join("exe").display())))?;
        // After an upgrade a restart runs the new file.
        let program = match program.to_str().and_then(|path| path.strip_suffix(" (deleted)")) {
            Some(path) => PathBuf::from(path),
            None => program,
        };
        let config = match config {
            Some(config) => std::path::absolute(config).map_err(Failure::at(config.display().to_string()))?,
            None => {
                let line = fs::read(process.join("cmdline")).unwrap_or_default();
                let line = String::from_utf8_lossy(&line);
                let chosen = chosen_config(&line.split('\0').collect::<Vec<_>>());
                let directory = fs::read_link(process.join("cwd")).unwrap_or_default();
                directory.join(chosen.unwrap_or(CONFIG))
            }
        };
        Ok(Containerd {
            pid: Some(pid),
            program,
            config,
        })
    }

    /// The settings that containerd makes of its configuration as it is now.
    pub(super) fn dump(&self) -> Result<Dump, String> {
        let mut command = command(&self.program);
        command.arg("--config").arg(&self.config).args(["config", "dump"]);
        let output = run(command, DUMP_TIMEOUT)?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let last = stderr.lines().rfind(|line| !line.trim().is_empty());
            return Err(failure::one_line(last.unwrap_or("it names no reason")));
        }
        Dump::parse(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// The file that `-c` or `--config` names on a command line.
fn chosen_config<'a>(words: &[&'a str]) -> Option<&'a str> {
    let mut words = words.iter().skip(1);
    while let Some(word) = words.next() {
        match *word {
            "-c" | "--config" | "-config" => return words.next().copied(),
            word => {
                let joined = ["--config=", "-config=", "-c="];
                if let Some(file) = joined.iter().find_map(|option| word.strip_prefix(option)) {
                    return Some(file);
                }
            }
        }
    }
    None
}

/// The output of `containerd config dump`.
#[derive(Debug)]
pub(super) struct Dump {
    text: String,
    settings: Settings,
}

impl Dump {
    fn parse(text: String) -> Result<Dump, String> {
        let settings = Settings::parse(&text).map_err(|why| format!("`containerd config dump`: {why}"))?;
        Ok(Dump { text, settings })
    }

    /// True if this containerd merges the tables of imported files. Up to 1.7 a file replaces all of a plugin's.
    pub(super) fn merges(&self) -> bool {
        self.settings.version() >= Some(3)
    }

    /// The directory of containerd's state.
    pub(super) fn state(&self) -> PathBuf {
        self.settings.state().unwrap_or("/run/containerd").into()
    }

    /// The shims of Husk's handlers.
    pub(super) fn shims(&self) -> Vec<PathBuf> {
        let paths = self.settings.husk_shims().into_iter();
        paths.map(PathBuf::from).collect()
    }

    /// The runtime handlers of pods.
    pub(super) fn handlers(&self) -> BTreeSet<String> {
        self.settings.handler_names()
    }

    /// True if containerd does the same with the other settings.
    pub(super) fn is_same(&self, other: &Dump) -> bool {
        // Which files were read, in any order.
        let lines = |dump: &Dump| {
            let lines = dump.text.lines().filter(|line| !line.starts_with("imports ="));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        lines(self) == lines(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_that_of_the_command_line() {
        let chosen = |line: &str| chosen_config(&line.split(' ').collect::<Vec<_>>()).map(str::to_owned);
        assert_eq!(chosen("containerd"), None);
        assert_eq!(
            chosen("containerd -l debug --config /a.toml").as_deref(),
            Some("/a.toml")
        );
        assert_eq!(chosen("containerd -c=/b.toml").as_deref(), Some("/b.toml"));
        assert_eq!(chosen("containerd --config"), None);
    }

    #[test]
    fn dumps_are_compared_without_the_files_that_were_read() {
        let dump = |text: &str| Dump::parse(text.to_owned()).unwrap();
        let (old, new) = (
            dump("version = 2\n"),
            dump("version = 4\nimports = ['a']\nstate = '/x'\n"),
        );
        assert!(!old.merges() && new.merges());
        assert_eq!(old.state(), Path::new("/run/containerd"));
        assert_eq!(new.state(), Path::new("/x"));
        assert!(new.is_same(&dump("version = 4\nimports = ['b']\nstate = '/x'\n")));
        assert!(!new.is_same(&old));
    }

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let shell = |script: &str| {
            let mut shell = command(Path::new("/bin/sh"));
            shell.args(["-c", script]);
            shell
        };
        let output = run(shell("echo out; echo err >&2"), Duration::from_secs(60)).unwrap();
        assert_eq!(
            (&output.stdout[..], &output.stderr[..]),
            (&b"out\n"[..], &b"err\n"[..])
        );
        let why = run(shell("exec sleep 60"), Duration::from_millis(50)).unwrap_err();
        assert!(why.starts_with("/bin/sh: no end after"), "{why}");
        let why = run(command(Path::new("/nowhere")), Duration::from_secs(1)).unwrap_err();
        assert!(why.starts_with("/nowhere: No such file"), "{why}");
    }
}
