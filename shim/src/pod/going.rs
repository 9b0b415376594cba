//! How containers end and go.

use std::time::SystemTime;

use containerd_shim_protos::events::task as events;
use containerd_shim_protos::protobuf::MessageField;
use husk_monitor::monitor::final_status;
use husk_proto::shim::v1::Status as VmStatus;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::{info, warn};

use super::container::{ContainerExit, ContainerPhase};
use super::ending::{self, exit_status};
use super::{Pod, Reply, TaskError, TaskOutcome};
use crate::publisher::timestamp;
use crate::spec::Role;

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
            let sandbox = container.role == Role::Sandbox;
            if let Some(status) = ending::signal_exit_status(signal)? {
                self.stop(id, status);
                if sandbox {
                    self.kill_vm().await;
                }
            }
            return Ok(());
        };
        let boots = *container.phase.borrow() == ContainerPhase::Created;
        vm.signal(signal, boots).await
    }

    /// A VM does not outlive its sandbox.
    pub(super) async fn kill_vm(&self) {
        let containers = self.containers.values();
        for container in containers.filter(|container| !container.is_stopped()) {
            if let Some(vm) = &container.vm {
                let _ = vm.handle.kill().await;
            }
        }
    }

    pub(super) fn ended(&mut self, id: String, status: &VmStatus) {
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
        self.spawn_task(async move {
            if let Some(streams) = streams {
                streams.end(words).await;
            }
            TaskOutcome::Finished(id, exit)
        });
    }

    /// A container has ended.
    pub(super) fn stop(&mut self, id: &str, status: u32) {
        let Some(container) = self.containers.get(id) else {
            return;
        };
        let exit = ContainerExit {
            pid: container.pid,
            status,
            at: SystemTime::now(),
        };
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
            self.give_back(id, exit, reply);
        }
    }

    /// One that was never started is killed for it.
    pub(super) async fn delete(&mut self, id: &str, reply: Reply<ContainerExit>) {
        let container = match self.find(id) {
            Ok(container) => container,
            Err(error) => return drop(reply.send(Err(error))),
        };
        let phase = *container.phase.borrow();
        match (phase, &mut container.vm) {
            (ContainerPhase::Stopped(exit), _) => self.give_back(id, exit, reply),
            (ContainerPhase::Created, Some(vm)) => {
                container.delete_reply = Some(reply);
                // One that has ended is about to be told of.
                let _ = vm.handle.kill().await;
            }
            (ContainerPhase::Created, None) => {
                container.delete_reply = Some(reply);
                self.stop(id, ending::KILLED);
            }
            _ => {
                let text = format!("container {id} has not ended: kill it first");
                let _ = reply.send(Err(TaskError::precondition(text)));
            }
        }
    }

    fn give_back(&mut self, id: &str, exit: ContainerExit, reply: Reply<ContainerExit>) {
        let Some(container) = self.containers.get_mut(id) else {
            return;
        };
        let resources = std::mem::take(&mut container.resources);
        if container.role == Role::Sandbox {
            self.leave_pod_cgroup();
        }
        let id = id.to_owned();
        self.spawn_task(async move {
            let released = spawn_blocking(move || resources.release()).await;
            let released = released.unwrap_or_else(|error| Err(error.to_string()));
            TaskOutcome::Released(id, released, exit, reply)
        });
    }

    pub(super) fn released(
        &mut self,
        id: &str,
        released: Result<(), String>,
        exit: ContainerExit,
        reply: Reply<ContainerExit>,
    ) {
        if let Err(error) = released {
            warn!(id, error, "something of the container stays");
        }
        self.containers.remove(id);
        self.publisher.publish(&events::TaskDelete {
            container_id: id.to_owned(),
            id: id.to_owned(),
            pid: exit.pid,
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        });
        let _ = reply.send(Ok(exit));
    }

    /// Leaves the sandbox's cgroup, which otherwise could not be removed.
    pub(super) fn leave_pod_cgroup(&self) {
        if let Some(original_cgroup) = &self.original_cgroup
            && let Err(error) = original_cgroup.add_process(std::process::id())
        {
            warn!(%error, "the shim cannot leave the pod's cgroup");
        }
    }

    /// Gives back what containers hold that nobody deleted.
    pub(super) async fn release_all(&mut self) {
        self.kill_vm().await;
        self.leave_pod_cgroup();
        for container in std::mem::take(&mut self.containers).into_values() {
            if let Some(vm) = &container.vm {
                let ended = final_status(vm.handle.status());
                let _ = timeout(ending::KILLED_WITHIN, ended).await;
            }
            let released = spawn_blocking(move || container.resources.release()).await;
            if let Ok(Err(error)) = released {
                warn!(id = container.id, error, "something of the container stays");
            }
        }
    }
}
