//! The end of containers.

use std::time::SystemTime;

use containerd_shim_protos::events::task as events;
use containerd_shim_protos::protobuf::MessageField;
use husk_proto::shim::v1::{Phase, Status as VmStatus};
use husk_proto::vmm::v1::ExitReason;
use tracing::info;

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
        let container = self.find(id)?;
        if container.is_stopped() {
            return Err(TaskError::not_found(format!("container {id} has ended already")));
        }
        let Some(vm) = &container.vm else {
            if *container.phase.borrow() == ContainerPhase::Creating {
                return Err(TaskError::precondition(format!(
                    "container {id} is being created"
                )));
            }
            if let Some(Launching::Building { signal: received }) = &mut container.launching {
                *received = Some(signal).filter(|signal| *signal != 0).or(*received);
                return Ok(());
            }
            let sandbox = container.role == Role::Sandbox;
            let status = match container.role {
                Role::Launcher(_) | Role::ConsoleLog => signals::orderly_exit_status(signal)?,
                _ => signals::signal_exit_status(signal)?,
            };
            if let Some(status) = status {
                (container.launching, container.console_output) = (None, None);
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

    /// Kills the VM. It does not outlive its sandbox.
    pub(super) async fn kill_vm(&mut self) {
        let containers = self.containers.values_mut();
        for container in containers.filter(|container| !container.is_stopped()) {
            match &mut container.launching {
                Some(Launching::Building { signal }) => *signal = Some(signals::SIGKILL),
                launching => *launching = None,
            }
            if let Some(vm) = &container.vm {
                let _ = vm.handle.kill().await;
            }
        }
    }

    pub(super) fn vm_ended(&mut self, id: String, status: &VmStatus) {
        let Some(container) = self.containers.get_mut(&id) else {
            return;
        };
        let oom = container
            .resources
            .cgroup
            .as_ref()
            .is_some_and(|cgroup| cgroup.oom_kills() > 0);
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
        let Some(container) = self.containers.get(id) else {
            return;
        };
        let exit = ContainerExit {
            pid: container.pid,
            status,
            at: SystemTime::now(),
        };
        if matches!(container.role, Role::Launcher(_)) {
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
        if let Some(reply) = self
            .containers
            .get_mut(id)
            .and_then(|container| container.delete_reply.take())
        {
            self.release_resources(id, exit, reply);
        }
    }
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
}
