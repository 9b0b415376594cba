//! Stops VMs and waits until they are gone.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use husk_monitor::client;
use husk_monitor::state::VmDir;
use husk_proto::shim::v1::{KillRequest, ShutdownRequest, Status, WatchStatusRequest};
use tokio::time::Instant;
use tonic::Streaming;

use crate::failure::Failure;
use crate::live_vm;
use crate::status::{exit_summary, is_final};
use crate::vm_ref::VmRef;

/// Maximum time between the end of a VM and the removal of its state by the monitor.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Way of stopping a VM.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StopMode {
    /// Press the ACPI power button; kill after this many seconds, or the grace period of the manifest.
    Graceful(Option<u64>),
    /// Kill at once.
    Force,
}

/// Stops all of `vms` in parallel and waits for each. If some cannot be stopped, fails after the others have ended.
pub(crate) async fn stop_all(
    vms: impl IntoIterator<Item = Result<VmDir, Failure>>,
    mode: StopMode,
) -> Result<(), Failure> {
    let request =
        |found: Result<VmDir, Failure>| tokio::spawn(async move { StoppingVm::request(found?, mode).await });
    let asked: Vec<_> = vms.into_iter().map(request).collect();
    let mut failed = None;
    for ended in asked {
        let done = match ended.await? {
            Ok(ended) => ended.wait().await,
            Err(failure) => Err(failure),
        };
        if let Err(failure) = done
            && let Some(Failure::Runtime(text)) = failed.replace(failure)
        {
            eprintln!("error: {text}");
        }
    }
    failed.map_or(Ok(()), Err)
}

/// A VM that was asked to stop.
struct StoppingVm {
    vm: VmRef,
    dir: VmDir,
    /// None if the VM was already ending and its monitor no longer answers.
    statuses: Option<Streaming<Status>>,
    /// Time at which the monitor kills the VM; none if it was killed at once.
    deadline: Option<Instant>,
}

impl StoppingVm {
    /// Sends the request to the monitor, which answers at once unless it hangs.
    async fn request(dir: VmDir, mode: StopMode) -> Result<Self, Failure> {
        let vm = live_vm::vm_ref(&dir);
        let pid = dir.monitor_pid().unwrap_or_default();
        let hangs = format!("the monitor of {vm} does not answer; `kill -9 {pid}` ends it and the VM");
        let asked = tokio::time::timeout(live_vm::MONITOR_TIMEOUT, Self::send_request(&vm, &dir, mode)).await;
        match asked {
            Ok(Ok(asked)) => Ok(asked),
            // The VM ended by itself meanwhile.
            Ok(Err(_)) if removed_in_time(&dir).await => Ok(Self {
                vm,
                dir,
                statuses: None,
                deadline: None,
            }),
            Ok(Err(failure)) => Err(failure),
            Err(_) => Err(Failure::Runtime(hangs)),
        }
    }

    async fn send_request(vm: &VmRef, dir: &VmDir, mode: StopMode) -> Result<Self, Failure> {
        let mut client = client::connect(dir).await?;
        let statuses = client
            .watch_status(WatchStatusRequest::default())
            .await?
            .into_inner();
        let deadline = match mode {
            StopMode::Force | StopMode::Graceful(Some(0)) => {
                client.kill(KillRequest {}).await?;
                None
            }
            StopMode::Graceful(grace_seconds) => {
                let answer = client
                    .shutdown(ShutdownRequest { grace_seconds })
                    .await?
                    .into_inner();
                Instant::now().checked_add(Duration::from_secs(answer.grace_seconds))
            }
        };
        Ok(Self {
            vm: vm.clone(),
            dir: dir.clone(),
            statuses: Some(statuses),
            deadline,
        })
    }

    /// Waits until the VM has ended and its state is removed; shows the time left until it is killed.
    async fn wait(mut self) -> Result<(), Failure> {
        let Some(statuses) = &mut self.statuses else {
            eprintln!("{} has ended", self.vm);
            return Ok(());
        };
        let live = std::io::stderr().is_terminal();
        if let Some(deadline) = self.deadline.filter(|_| !live) {
            let left = deadline.saturating_duration_since(Instant::now());
            eprintln!(
                "{}: shutting down (force-off in {} s)",
                self.vm,
                left.as_secs_f64().ceil()
            );
        }
        let mut tick = tokio::time::interval(Duration::from_secs(1));
        let last = loop {
            tokio::select! {
                status = statuses.message() => match status {
                    Ok(Some(status)) if is_final(&status) => break Some(status),
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => break None,
                },
                now = tick.tick() => if let Some(deadline) = self.deadline.filter(|_| live) {
                    let left = deadline.saturating_duration_since(now);
                    eprint!("\r\x1b[K{}: shutting down (force-off in {} s)", self.vm, left.as_secs_f64().ceil());
                    let _ = std::io::stderr().flush();
                },
            }
        };
        let erase = if live && self.deadline.is_some() {
            "\r\x1b[K"
        } else {
            ""
        };
        match last {
            Some(status) => eprintln!("{erase}{}: {}", self.vm, exit_summary(&status)),
            None => eprintln!("{erase}{}: the monitor died and the VM ended", self.vm),
        }
        if removed_in_time(&self.dir).await {
            return Ok(());
        }
        Err(Failure::Runtime(format!(
            "{} has ended, but its monitor has not removed its state: try `husk rm --force {}`",
            self.vm, self.vm
        )))
    }
}

/// Waits until the state of a VM is removed; false after [`REMOVAL_TIMEOUT`].
async fn removed_in_time(dir: &VmDir) -> bool {
    let waited = Instant::now();
    while dir.is_live() {
        if waited.elapsed() > REMOVAL_TIMEOUT {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    true
}
