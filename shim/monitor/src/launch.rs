//! Starting a monitor as a process.
//!
//! `husk-monitor` is executed with a [`MonitorConfig`] as JSON on its standard input. It leaves the caller's session.
//! Once the VM runs or its start has failed, it writes a [`StartReport`] to standard output, as one line of JSON.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use husk_vmi::VmPlan;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

/// The configuration of a monitor.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MonitorConfig {
    /// The runtime directory ([`crate::state::RuntimeDir::path`]).
    pub runtime_dir: PathBuf,
    /// The VM.
    pub plan: VmPlan,
    /// Path of the pod's network namespace. Without one, a VM with interfaces gets a namespace of its own.
    #[serde(default)]
    pub netns: Option<PathBuf>,
    /// The manifest's metadata, kept for `husk inspect`.
    pub vmi: serde_json::Value,
    /// Directory of a snapshot, whose plan `plan` is: the VM goes on from it.
    #[serde(default)]
    pub snapshot: Option<PathBuf>,
    /// The interfaces have other MAC addresses than in the snapshot: its guest releases each NIC and finds another.
    #[serde(default)]
    pub replug_nics: bool,
    /// Names of the disks of `plan` that were plugged while the VM of the snapshot ran.
    #[serde(default)]
    pub plugged_disks: Vec<String>,
}

/// A snapshot that a VM goes on from.
#[derive(Debug, Clone)]
pub(crate) struct RestoreOptions {
    pub(crate) directory: PathBuf,
    /// As in [`MonitorConfig`].
    pub(crate) replug_nics: bool,
    /// As in [`MonitorConfig`].
    pub(crate) plugged_disks: Vec<String>,
}

/// The result of a start, reported once: when the VM runs (or is paused before its first instruction), or has failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StartReport {
    /// The VM runs.
    Running {
        /// The monitor's process id.
        pid: u32,
    },
    /// The start failed and has been cleaned up.
    Failed {
        /// As `husk.shim.v1.Status.reason`. `AlreadyRunning` if a VM of that name runs.
        reason: String,
        /// The error and its causes, on one line.
        message: String,
    },
}

/// An error of starting a VM.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program could not be executed.
    #[error("the monitor could not be started")]
    Spawn(#[source] io::Error),
    /// The monitor ended without a report. Its standard error may hold the cause.
    #[error("the monitor ended before the VM ran")]
    Silent,
    /// The VM could not be started.
    #[error("{message}")]
    Failed {
        /// As in [`StartReport::Failed`].
        reason: String,
        /// As in [`StartReport::Failed`].
        message: String,
    },
}

/// Maximum length of a report, in bytes. A program that writes more is not a monitor.
const REPORT_BYTES: u64 = 64 << 10;

/// Executes `command`, `husk-monitor` with its arguments, as the monitor of `config` and waits until the VM runs.
/// Returns the monitor's process id. If the caller dies or drops the future before the report, the VM is ended.
/// The first poll passes the configuration, and blocks until the monitor has read most of a long one.
pub async fn launch(mut command: Command, config: &MonitorConfig) -> Result<u32, LaunchError> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(LaunchError::Spawn)?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    if let Some(stdin) = stdin {
        // The end of the monitor is detected below.
        let _ = serde_json::to_writer(io::BufWriter::new(stdin), config);
    }
    let line = match stdout {
        Some(stdout) => first_line(stdout).await.map_err(LaunchError::Spawn)?,
        None => String::new(),
    };
    match serde_json::from_str(&line) {
        Ok(StartReport::Running { pid }) => Ok(pid),
        Ok(StartReport::Failed { reason, message }) => {
            wait_for_exit(child).await;
            Err(LaunchError::Failed { reason, message })
        }
        Err(_) => {
            let _ = child.kill();
            wait_for_exit(child).await;
            Err(LaunchError::Silent)
        }
    }
}

async fn first_line(stdout: ChildStdout) -> io::Result<String> {
    let stdout = pipe::Receiver::from_owned_fd(stdout.into())?;
    let mut line = String::new();
    BufReader::new(stdout.take(REPORT_BYTES))
        .read_line(&mut line)
        .await?;
    Ok(line)
}

/// Waits until a monitor that is ending has ended.
async fn wait_for_exit(mut child: Child) {
    let _ = spawn_blocking(move || child.wait()).await;
}

/// The receiver of the progress of a start.
#[derive(Debug)]
pub(crate) enum StartMode {
    /// To another process, over standard output.
    Process,
    /// To this process, which decides when to boot.
    Embedded(EmbeddedStart),
}

/// Channels between the monitor and the process that embeds it.
#[derive(Debug)]
pub(crate) struct EmbeddedStart {
    /// Takes the VMM's process id once the machine is built.
    pub(crate) built: Option<oneshot::Sender<u32>>,
    /// Completes when the VM may boot.
    pub(crate) boot: oneshot::Receiver<()>,
    pub(crate) report: oneshot::Sender<StartReport>,
}

impl StartMode {
    /// Reports that the machine is built. Returns when it may boot.
    pub(crate) async fn built(&mut self, pid: u32) {
        let StartMode::Embedded(host) = self else { return };
        if let Some(built) = host.built.take() {
            let _ = built.send(pid);
        }
        if (&mut host.boot).await.is_err() {
            // The VM is about to be killed.
            std::future::pending().await
        }
    }

    /// Reports the result of the start. Returns false if nobody reads it.
    pub(crate) fn report(self, report: &StartReport) -> bool {
        match self {
            StartMode::Process => print(report),
            StartMode::Embedded(host) => {
                // The embedding process exists as long as the VM. It may have stopped waiting.
                let _ = host.report.send(report.clone());
                true
            }
        }
    }
}

/// Writes the report and closes standard output.
fn print(report: &StartReport) -> bool {
    let mut stdout = io::stdout().lock();
    let said = serde_json::to_writer(&mut stdout, report).map_err(io::Error::from);
    let said = said
        .and_then(|()| stdout.write_all(b"\n"))
        .and_then(|()| stdout.flush());
    let closed = File::open("/dev/null").map(|null| rustix::stdio::dup2_stdout(null).is_ok());
    said.is_ok() && closed.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_of_another_version_is_refused() {
        let refused = serde_json::from_str::<MonitorConfig>(r#"{"later": 1}"#).unwrap_err();
        assert!(refused.to_string().contains("unknown field `later`"), "{refused}");
    }
}
