//! A single command within the lab, identified by its ID.

use super::run::{Command, GRACE, share_of};
use super::ssh;
use super::state::{Lab, LabFolder};
use crate::{checkout, shell};
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use std::path::Path;
use std::time::SystemTime;
use tempfile::NamedTempFile;

/// A command in the lab.
#[derive(Debug)]
pub struct Remote<'a> {
    dir: &'a LabFolder,
    lab: &'a Lab,
    id: String,
    /// Becomes non-empty once the lab has accepted the login.
    connected: NamedTempFile,
}

impl<'a> Remote<'a> {
    /// A command that has not been started yet.
    pub fn new(dir: &'a LabFolder, lab: &'a Lab) -> Result<Self> {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let id = format!("{}-{}", std::process::id(), now.as_nanos());
        Ok(Self {
            dir,
            lab,
            id,
            connected: NamedTempFile::new()?,
        })
    }

    /// The ssh that runs `command` under this id.
    pub fn ssh(&self, command: &Command) -> Result<std::process::Command> {
        let mut ssh = ssh::command(self.lab.port);
        if command.tty {
            ssh.arg("-tt");
        }
        let note = format!("echo >{}", shell::quote(&self.connected.path().to_string_lossy()));
        ssh.args([
            "-o",
            "PermitLocalCommand=yes",
            "-o",
            &format!("LocalCommand={}", note.replace('%', "%%")),
        ]);
        let share = share_of(self.dir.number())?.to_string_lossy().into_owned();
        let mut env = vec![
            (
                "PATH".to_owned(),
                format!(
                    "{}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                    checkout::release().display()
                ),
            ),
            ("HUSK_LAB_SHARE".to_owned(), share.clone()),
            (
                // The user in the lab is another, with a separate cache.
                "HUSK_IMAGES".to_owned(),
                checkout::cache()?.join("images").display().to_string(),
            ),
        ];
        env.extend(std::env::vars().filter(|(name, _)| {
            name.starts_with("HUSK_")
                || name == "RUST_LOG"
                || name == "RUST_BACKTRACE"
                || command.tty && name == "TERM"
        }));
        env.extend(command.env.iter().cloned());
        let env = env.into_iter().map(|(name, value)| format!("{name}={value}"));
        let here = std::env::current_dir().unwrap_or_default();
        ssh.arg(format!(
            "exec env {} sh {} {}",
            shell::join(env),
            shell::join([
                &script("run.sh"),
                &self.id,
                &share,
                &here.to_string_lossy().into_owned()
            ]),
            shell::join(&command.words)
        ));
        Ok(ssh)
    }

    /// Sends `signal` to the command, and SIGKILL if it still runs some seconds later.
    pub fn signal(&self, signal: Signal) {
        // No other signal ends a command: see `Signals`.
        let name = match signal {
            Signal::INT => "INT",
            Signal::HUP => "HUP",
            _ => "TERM",
        };
        let words = shell::join(["sh", &script("signal.sh"), &self.id, name]);
        // Nothing more can be done here for a lab that does not answer: the next command finds it hung.
        ssh::quietly(self.lab.port, &words, GRACE);
    }

    /// The exit status recorded in the lab; nothing if the command never started.
    ///
    /// # Errors
    /// If the connection was lost after it may have started.
    pub fn status(&self) -> Result<Option<u8>> {
        let state = format!("/run/husk-lab/runs/{}", self.id);
        let ask = format!("[ -e {state} ] || exit 1; cat {state}/status || exit 2");
        let answer = match self.lab.alive() {
            true => ssh::quietly(self.lab.port, &ask, GRACE),
            false => None,
        };
        match answer {
            Some((Some(0), status)) => status
                .trim()
                .parse()
                .map(Some)
                .context("the lab records no status"),
            Some((Some(1), _)) => Ok(None),
            _ if !self.connected.path().metadata().is_ok_and(|file| file.len() > 0) => Ok(None),
            _ => bail!(
                "the connection to the command was lost; the next command boots the lab again if it is dead"
            ),
        }
    }
}

fn script(name: &str) -> String {
    let path = Path::new("xtask/src/lab/guest").join(name);
    checkout::root().join(path).to_string_lossy().into_owned()
}
