//! The end of containers.

use std::time::SystemTime;

use containerd_shim_protos::events::task as events;
use containerd_shim_protos::protobuf::MessageField;
use husk_cgroup::Cgroup;
use husk_proto::shim::v1::{Phase, Status as VmStatus};
use husk_proto::vmm::v1::ExitReason;
use tracing::{info, warn};

use super::Pod;
use super::command::TaskOutcome;
use super::container::{ContainerExit, ContainerPhase, Launching};
use super::signals::{self, KILLED};
use super::task_error::TaskError;
use crate::logging;
use crate::publisher::timestamp;
use crate::spec::Role;
use crate::stdio::Streams;

impl Pod {
    pub(super) async fn kill(&mut self, id: &str, signal: u32) -> Result<(), TaskError> {
        let in_pod = self.sandbox().is_some();
        let container = self.find(id)?;
        if container.is_stopped() {
            return Err(TaskError::not_found(format!("container {id} has ended already")));
        }
        if !in_pod && signals::is_of_terminal(signal) {
            return Ok(());
        }
        let Some(vm) = &container.vm else {
            if let Some(building) = &mut container.building {
                if signals::signal_exit_status(signal)?.is_some() {
                    building.stop();
                }
                return Ok(());
            }
            if *container.phase.borrow() == ContainerPhase::Creating {
                if signals::signal_exit_status(signal)?.is_some() {
                    // SIGKILL also ends what another signal is about to end.
                    match signal {
                        signals::SIGKILL => container.early_signal = Some(signal),
                        _ => _ = container.early_signal.get_or_insert(signal),
                    }
                }
                return Ok(());
            }
            let sandbox = container.role == Role::Sandbox;
            let status = match container.role {
                Role::Launcher(_) | Role::ConsoleLog | Role::LauncherVolume(_) => {
                    signals::orderly_exit_status(signal)?
                }
                _ => signals::signal_exit_status(signal)?,
            };
            if let (Some(Launching::Building { exit, stop }), Some(status)) =
                (&mut container.launching, status)
            {
                *exit = Some(status);
                stop.stop();
                return Ok(());
            }
            if let (Some(Launching::Waiting(_)), Some(status)) = (&container.launching, status) {
                self.launcher_exits(id, status);
                return Ok(());
            }
            if let Some(status) = status {
                container.console_output = None;
                self.record_exit(id, status);
                if sandbox {
                    self.kill_vm().await;
                }
            }
            return Ok(());
        };
        let boots = *container.phase.borrow() == ContainerPhase::Created;
        vm.signal(signal, boots).await
    }

    /// Ends a container without a VM that got a signal while it was created.
    pub(super) async fn end_if_killed(&mut self, id: &str) {
        let found = self.containers.get_mut(id);
        if let Some(signal) = found.and_then(|container| container.early_signal.take())
            && let Err(error) = self.kill(id, signal).await
        {
            warn!(id, %error, "the container was not ended by signal {signal}");
        }
    }

    /// Kills the VM. It does not outlive its sandbox.
    pub(super) async fn kill_vm(&mut self) {
        let mut waiting = Vec::new();
        let containers = self.containers.values_mut();
        for container in containers.filter(|container| !container.is_stopped()) {
            if let Some(building) = &mut container.building {
                building.stop();
            }
            match &mut container.launching {
                Some(Launching::Building { exit, stop }) => {
                    *exit = Some(KILLED);
                    stop.stop();
                }
                Some(Launching::Waiting(_)) => waiting.push(container.id.clone()),
                None => {}
            }
            if let Some(vm) = &container.vm {
                let _ = vm.handle.kill().await;
            }
        }
        for id in waiting {
            self.launcher_exits(&id, KILLED);
        }
    }

    pub(super) fn vm_ended(&mut self, id: String, status: &VmStatus) {
        let found = self.containers.get(&id);
        if found.is_some_and(|container| matches!(container.role, Role::Launcher(_))) {
            self.record_end(status);
        }
        let Some(container) = self.containers.get_mut(&id) else {
            return;
        };
        let oom_kills = container.resources.cgroup.as_ref().map_or(0, Cgroup::oom_kills);
        let oom = is_oom(status, oom_kills);
        let Some(vm) = &mut container.vm else { return };
        let (exit, words) = exit_status(status, oom);
        info!(
            id,
            exit,
            reason = status.reason,
            message = status.message,
            "the VM ended"
        );
        if oom {
            self.publisher.publish(&events::TaskOOM {
                container_id: id.clone(),
                ..Default::default()
            });
        }
        let streams = vm.streams.take();
        if let (None, Some(words)) = (&streams, &words) {
            // The last line of the container's log.
            warn!("{words}");
        }
        // The console ends with its last handle.
        vm.console = None;
        let printed: Vec<Streams> = self
            .containers
            .values_mut()
            .filter_map(|container| container.console_output.take())
            .collect();
        self.spawn_task(async move {
            let printed = printed.into_iter().map(|streams| streams.end(None));
            let printed = futures_util::future::join_all(printed);
            let own = async {
                if let Some(streams) = streams {
                    streams.end(words).await;
                }
            };
            tokio::join!(own, printed);
            TaskOutcome::Finished(id, exit)
        });
    }

    /// Records the exit of a container.
    pub(super) fn record_exit(&mut self, id: &str, status: u32) {
        let found = self.containers.get(id);
        let Some(container) = found.filter(|container| !container.is_stopped()) else {
            return;
        };
        let exit = ContainerExit {
            pid: container.pid,
            status,
            at: SystemTime::now(),
        };
        let launcher = matches!(container.role, Role::Launcher(_));
        if launcher {
            // containerd reads the container's output to its end before it deletes the container.
            logging::end_copy();
        }
        container.phase.send_replace(ContainerPhase::Stopped(exit));
        self.publisher.publish(&events::TaskExit {
            container_id: id.to_owned(),
            id: id.to_owned(),
            pid: exit.pid,
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        });
        if !container.delete_replies.is_empty() {
            self.release_resources(id, exit);
        }
        if launcher {
            self.launcher_ended = true;
            self.end_launcher_volumes();
        }
    }
}

impl Pod {
    /// Ends the volume containers of a launcher pod. KubeVirt's end when their sockets are removed, at the end of
    /// `compute`.
    fn end_launcher_volumes(&mut self) {
        let volumes = self
            .containers
            .values()
            .filter(|container| matches!(container.role, Role::LauncherVolume(_)) && container.is_running());
        let ids: Vec<String> = volumes.map(|container| container.id.clone()).collect();
        for id in ids {
            self.record_exit(&id, 0);
        }
    }
}

/// True if the OOM killer ended the VM. It kills the VMM by a signal. Kills in a cgroup whose VM ended otherwise were
/// of other processes: those of a removed scope are counted in its slice, which may have other services.
fn is_oom(status: &VmStatus, oom_kills: u64) -> bool {
    oom_kills > 0 && status.reason == "VmmDied"
}

/// Converts the final status of a VM to an exit status. If the guest did not power off, the second value is the reason.
pub(super) fn exit_status(status: &VmStatus, oom: bool) -> (u32, Option<String>) {
    if status.phase() == Phase::Succeeded {
        return (0, None);
    }
    let killed = matches!(status.reason.as_str(), "Killed" | "GracePeriodExpired");
    let exit = match status.exit() {
        _ if killed || oom => KILLED,
        ExitReason::GuestPanic => 10,
        ExitReason::TripleFault => 11,
        ExitReason::BootFailed => 12,
        ExitReason::Watchdog => 14,
        _ if status.reason == "VmmDied" => KILLED,
        _ => 1,
    };
    let words = if oom {
        "the VM ran out of memory and was killed: raise resources.limits.memory".to_owned()
    } else {
        status.message.clone()
    };
    (exit, Some(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(phase: Phase, reason: &str, exit: ExitReason) -> VmStatus {
        VmStatus {
            phase: phase.into(),
            reason: reason.into(),
            message: "why".into(),
            exit: exit.into(),
            ..VmStatus::default()
        }
    }

    #[test]
    fn ends_have_their_exit_status() {
        let exit = |phase, reason, exit, oom| exit_status(&status(phase, reason, exit), oom);
        assert_eq!(
            exit(Phase::Succeeded, "Poweroff", ExitReason::Poweroff, false),
            (0, None)
        );
        let failed = [
            ("Killed", ExitReason::Poweroff, 137),
            ("GracePeriodExpired", ExitReason::Error, 137),
            ("GuestPanic", ExitReason::GuestPanic, 10),
            ("TripleFault", ExitReason::TripleFault, 11),
            ("BootFailed", ExitReason::BootFailed, 12),
            ("Watchdog", ExitReason::Watchdog, 14),
            ("VmmDied", ExitReason::Error, 137),
            ("VmmFailed", ExitReason::Error, 1),
        ];
        for (reason, why, wanted) in failed {
            let (status, words) = exit(Phase::Failed, reason, why, false);
            assert_eq!((status, words.as_deref()), (wanted, Some("why")), "{reason}");
        }
        let (status, words) = exit(Phase::Failed, "VmmDied", ExitReason::Error, true);
        assert!(status == 137 && words.unwrap().contains("out of memory"));
    }

    #[test]
    fn only_a_vmm_that_a_signal_ended_ran_out_of_memory() {
        let died = status(Phase::Failed, "VmmDied", ExitReason::Error);
        assert!(is_oom(&died, 1) && !is_oom(&died, 0));
        for (reason, why) in [
            ("Poweroff", ExitReason::Poweroff),
            ("Killed", ExitReason::Error),
            ("GracePeriodExpired", ExitReason::Error),
            ("GuestPanic", ExitReason::GuestPanic),
            ("TripleFault", ExitReason::TripleFault),
            ("BootFailed", ExitReason::BootFailed),
            ("Watchdog", ExitReason::Watchdog),
            ("VmmFailed", ExitReason::Error),
        ] {
            assert!(!is_oom(&status(Phase::Failed, reason, why), 1), "{reason}");
        }
    }
}
