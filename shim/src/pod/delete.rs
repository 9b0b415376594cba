//! Deleting containers.

use containerd_shim_protos::events::task as events;
use containerd_shim_protos::protobuf::MessageField;
use husk_monitor::monitor::final_status;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::warn;

use super::Pod;
use super::command::TaskOutcome;
use super::container::{ContainerExit, ContainerPhase};
use super::signals;
use super::task_error::{Reply, TaskError};
use crate::publisher::timestamp;
use crate::spec::Role;

impl Pod {
    /// Deletes a container. One that was never started is killed first, and so is a VM that is being built.
    pub(super) async fn delete(&mut self, id: &str, reply: Reply<ContainerExit>) {
        let container = match self.find(id) {
            Ok(container) => container,
            Err(error) => return drop(reply.send(Err(error))),
        };
        if let Some(building) = &mut container.building {
            building.stop();
        }
        let phase = *container.phase.borrow();
        match (phase, &mut container.vm) {
            (ContainerPhase::Stopped(exit), _) => {
                container.delete_replies.push(reply);
                self.release_resources(id, exit);
            }
            (ContainerPhase::Created, Some(vm)) => {
                container.delete_replies.push(reply);
                // If the VM has ended, its exit is about to be recorded.
                let _ = vm.handle.kill().await;
            }
            (ContainerPhase::Created, None) => {
                container.delete_replies.push(reply);
                self.record_exit(id, signals::KILLED);
            }
            (ContainerPhase::Creating, _) => container.delete_replies.push(reply),
            (ContainerPhase::Running { .. }, _) => {
                let text = format!("container {id} has not ended: kill it first");
                let _ = reply.send(Err(TaskError::precondition(text)));
            }
        }
    }

    /// Ends a container without a VM that was deleted while it was created.
    pub(super) fn end_if_deleted(&mut self, id: &str) {
        let found = self.containers.get(id);
        if found.is_some_and(|container| !container.delete_replies.is_empty()) {
            self.record_exit(id, signals::KILLED);
        }
    }

    /// Releases the resources of a container, once.
    pub(super) fn release_resources(&mut self, id: &str, exit: ContainerExit) {
        let found = self.containers.get_mut(id);
        let Some(container) = found.filter(|container| !container.releasing) else {
            return;
        };
        container.releasing = true;
        let resources = std::mem::take(&mut container.resources);
        if container.role == Role::Sandbox {
            self.leave_pod_cgroup();
        }
        let id = id.to_owned();
        self.spawn_task(async move {
            let released = spawn_blocking(move || resources.release()).await;
            let released = released.unwrap_or_else(|error| Err(error.to_string()));
            TaskOutcome::Released(id, released, exit)
        });
    }

    pub(super) fn released(&mut self, id: &str, released: Result<(), String>, exit: ContainerExit) {
        if let Err(error) = released {
            warn!(id, error, "the container was not fully removed");
        }
        let Some(container) = self.containers.remove(id) else {
            return;
        };
        self.publisher.publish(&events::TaskDelete {
            container_id: id.to_owned(),
            id: id.to_owned(),
            pid: exit.pid,
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        });
        for reply in container.delete_replies {
            let _ = reply.send(Ok(exit));
        }
    }

    /// Moves this process out of the sandbox's cgroup, which could not be removed otherwise. The cgroup that it came
    /// from may be gone.
    pub(super) fn leave_pod_cgroup(&self) {
        if let Some(original_cgroup) = &self.original_cgroup
            && let Err(error) = original_cgroup.add_process_near(std::process::id())
        {
            warn!(%error, "the shim cannot leave the pod's cgroup");
        }
    }

    /// Releases the resources of containers that were not deleted.
    pub(super) async fn release_all(&mut self) {
        self.kill_vm().await;
        self.leave_pod_cgroup();
        for container in std::mem::take(&mut self.containers).into_values() {
            if let Some(vm) = &container.vm {
                let ended = final_status(vm.handle.status());
                let _ = timeout(signals::KILLED_WITHIN, ended).await;
            }
            let released = spawn_blocking(move || container.resources.release()).await;
            if let Ok(Err(error)) = released {
                warn!(id = container.id, error, "the container was not fully removed");
            }
        }
    }
}
