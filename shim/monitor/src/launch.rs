//! Starting a monitor as a process of its own.
//!
//! `PROGRAM monitor` is executed with a [`MonitorConfig`] as JSON on its standard input. It leaves the caller's
//! session and writes one line of JSON, a [`StartReport`], to its standard output once the VM runs or has failed to.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use husk_vmi::VmPlan;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// All a monitor needs to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MonitorConfig {
    /// The runtime directory ([`crate::state::RuntimeDir::path`]).
    pub runtime_dir: PathBuf,
    /// The VM.
    pub plan: VmPlan,
    /// The network namespace that is its pod's; none if it gets one of its own, as far as its plan has interfaces.
    #[serde(default)]
    pub netns: Option<PathBuf>,
    /// The manifest's metadata, kept for `husk inspect`.
    pub vmi: serde_json::Value,
}

/// What a monitor says once, when the VM runs (or is paused before its first instruction) or never will.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StartReport {
    /// The VM runs.
    Running {
        /// The monitor's process id.
        pid: u32,
    },
    /// Nothing runs and nothing is left.
    Failed {
        /// As `husk.shim.v1.Status.reason`; `AlreadyRunning` where a VM of that name lives.
        reason: String,
        /// For people: the chain of causes on one line.
        message: String,
    },
}

/// Why no VM was started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program could not be executed.
    #[error("the monitor could not be started")]
    Spawn(#[source] io::Error),
    /// It ended without a word; its standard error may say more.
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

/// A report is one short line; a monitor that writes more than this is not one.
const REPORT_BYTES: u64 = 64 << 10;

/// Executes `command` (its arguments set, for example `husk monitor`) as the monitor of `config` and waits until the
/// VM runs. Returns the monitor's process id. Where the caller dies first, the VM is ended.
pub fn launch(mut command: Command, config: &MonitorConfig) -> Result<u32, LaunchError> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(LaunchError::Spawn)?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    if let Some(stdin) = stdin {
        // A monitor that died is noticed below.
        let _ = serde_json::to_writer(io::BufWriter::new(stdin), config);
    }
    let mut line = String::new();
    if let Some(stdout) = stdout {
        BufReader::new(stdout.take(REPORT_BYTES))
            .read_line(&mut line)
            .map_err(LaunchError::Spawn)?;
    }
    match serde_json::from_str(&line) {
        Ok(StartReport::Running { pid }) => Ok(pid),
        Ok(StartReport::Failed { reason, message }) => {
            let _ = child.wait();
            Err(LaunchError::Failed { reason, message })
        }
        Err(_) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(LaunchError::Silent)
        }
    }
}

/// The monitor's way to say how the start goes.
#[derive(Debug)]
pub(crate) enum StartMode {
    /// Another process, which listens at the end of standard output.
    Process,
    /// This process, which says when to boot.
    Embedded(EmbeddedStart),
}

/// Where a host hears of its VM.
#[derive(Debug)]
pub(crate) struct EmbeddedStart {
    /// The VMM's process id, once the machine is built.
    pub(crate) built: Option<oneshot::Sender<u32>>,
    /// Then it may boot.
    pub(crate) boot: oneshot::Receiver<()>,
    pub(crate) report: oneshot::Sender<StartReport>,
}

impl StartMode {
    /// The machine is built. Returns when it shall boot.
    pub(crate) async fn built(&mut self, pid: u32) {
        let StartMode::Embedded(host) = self else { return };
        if let Some(built) = host.built.take() {
            let _ = built.send(pid);
        }
        if (&mut host.boot).await.is_err() {
            // It never shall: the VM is about to be killed.
            std::future::pending().await
        }
    }

    /// Says once whether the VM runs. False where nobody listens any more.
    pub(crate) fn report(self, report: &StartReport) -> bool {
        match self {
            StartMode::Process => print(report),
            StartMode::Embedded(host) => {
                // A host is there for as long as the VM; it may only have stopped waiting.
                let _ = host.report.send(report.clone());
                true
            }
        }
    }
}

/// Says it and lets go of standard output.
fn print(report: &StartReport) -> bool {
    let mut stdout = io::stdout().lock();
    let said = serde_json::to_writer(&mut stdout, report).map_err(io::Error::from);
    let said = said
        .and_then(|()| stdout.write_all(b"\n"))
        .and_then(|()| stdout.flush());
    let closed = File::open("/dev/null").map(|null| rustix::stdio::dup2_stdout(null).is_ok());
    said.is_ok() && closed.unwrap_or(false)
}
