//! The actor that owns a pod: its containers, one of which is the VM.
//!
//! Tasks do the slow work: building a VM, booting it, writing its last output. They send their outcome to the actor.

mod build;
mod build_stop;
mod command;
mod container;
mod create;
mod delete;
mod exec;
mod exit;
mod handle;
mod launcher;
mod signals;
mod start;
mod task_error;

use std::collections::BTreeMap;
use std::time::Duration;

use containerd_shim_protos::events::task as events;
use husk_cgroup::{Cgroup, CgroupStats};
use oci_spec::runtime::LinuxResources;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::warn;

use crate::publisher::Publisher;
use crate::spec::{self, MemoryLimit, Role};

pub(crate) use build::{cgroup_of, rootfs_of};
pub(crate) use command::PodCommand;
use command::TaskOutcome;
pub(crate) use container::ContainerPhase;
use container::{Container, ContainerStatus};
pub(crate) use exec::ExecRequest;
pub(crate) use handle::PodHandle;
use task_error::Reply;
pub(crate) use task_error::TaskError;

/// Maximum time the shim runs without containers. containerd may have been killed after it started the shim.
const IDLE: Duration = Duration::from_secs(30);

/// The state of a pod.
#[derive(Debug)]
pub(crate) struct Pod {
    mailbox: mpsc::Receiver<PodCommand>,
    self_sender: mpsc::WeakSender<PodCommand>,
    containers: BTreeMap<String, Container>,
    publisher: Publisher,
    /// Cgroup of this process at its start, to which it returns.
    original_cgroup: Option<Cgroup>,
    /// The last launcher container has ended. containerd deletes it soon afterwards.
    launcher_ended: bool,
    finished: bool,
}

impl Pod {
    pub(crate) fn new(publisher: Publisher, original_cgroup: Option<Cgroup>) -> (Pod, PodHandle) {
        let (sender, mailbox) = mpsc::channel(64);
        let pod = Pod {
            mailbox,
            self_sender: sender.downgrade(),
            containers: BTreeMap::new(),
            publisher,
            original_cgroup,
            launcher_ended: false,
            finished: false,
        };
        (pod, PodHandle::new(sender))
    }

    /// Runs until `Shutdown`. The returned publisher may have events to send.
    pub(crate) async fn run(mut self) -> Publisher {
        while !self.finished {
            let command = match self.containers.is_empty() {
                true => timeout(IDLE, self.mailbox.recv()).await.unwrap_or_else(|_| {
                    warn!("containerd created no container");
                    None
                }),
                false => self.mailbox.recv().await,
            };
            let Some(command) = command else {
                break;
            };
            self.handle_command(command).await;
        }
        self.release_all().await;
        self.publisher
    }

    async fn handle_command(&mut self, command: PodCommand) {
        match command {
            PodCommand::Create(request, reply) => self.create(*request, reply),
            PodCommand::Start(id, reply) => self.start(&id, reply),
            PodCommand::Delete(id, reply) => self.delete(&id, reply).await,
            PodCommand::Kill(id, signal, reply) => drop(reply.send(self.kill(&id, signal).await)),
            PodCommand::ContainerStatus(id, reply) => drop(reply.send(self.container_status(&id))),
            PodCommand::Exec(request, reply) => drop(reply.send(self.exec(request))),
            PodCommand::StartExec(id, exec_id, reply) => self.start_exec(&id, &exec_id, reply),
            PodCommand::KillExec(id, exec_id, signal, reply) => {
                let _ = reply.send(self.kill_exec(&id, &exec_id, signal));
            }
            PodCommand::DeleteExec(id, exec_id, reply) => {
                let _ = reply.send(self.delete_exec(&id, &exec_id));
            }
            PodCommand::ExecStatus(id, exec_id, reply) => drop(reply.send(self.exec_status(&id, &exec_id))),
            PodCommand::Stats(id, reply) => drop(reply.send(self.stats(&id))),
            PodCommand::Update(id, resources, reply) => self.update(&id, *resources, reply),
            PodCommand::CloseStdin(id, reply) => {
                let closed = self.find(&id).map(|container| {
                    if let Some(streams) = container.vm.as_mut().and_then(|vm| vm.streams.as_mut()) {
                        streams.close_stdin();
                    }
                });
                let _ = reply.send(closed);
            }
            PodCommand::Paused(id, paused) => self.publish_pause(id, paused),
            PodCommand::Shutdown { now, reply } => {
                self.finished = now || self.containers.is_empty();
                let _ = reply.send(Ok(()));
            }
            PodCommand::Outcome(outcome) => self.handle_outcome(outcome).await,
        }
    }

    async fn handle_outcome(&mut self, outcome: TaskOutcome) {
        match outcome {
            TaskOutcome::Built(id, built, reply) => self.built(&id, built, reply),
            TaskOutcome::Prepared(id, resources, prepared, reply) => match prepared {
                Ok(()) => {
                    if let Some(container) = self.containers.get_mut(&id) {
                        container.resources = resources;
                    }
                    self.created(&id, reply);
                    self.end_if_killed(&id).await;
                    self.end_if_deleted(&id);
                }
                Err(error) => self.not_created(&id, error, reply),
            },
            TaskOutcome::Booted(id, embedded_vm, booted, reply) => {
                self.booted(&id, *embedded_vm, booted, reply)
            }
            TaskOutcome::VmiWaitResult(id, launch, waited) => self.waited(id, launch, waited),
            TaskOutcome::Launched(id, launch, built, request) => self.launched(&id, launch, built, request),
            TaskOutcome::ConsoleConnected(id, connected) => self.console_connected(&id, connected),
            TaskOutcome::ExecEnded(id, exec_id, status) => self.exec_ended(&id, &exec_id, status),
            TaskOutcome::Ended(id, status) => self.vm_ended(id, &status),
            TaskOutcome::Finished(id, status) => self.record_exit(&id, status),
            TaskOutcome::Released(id, released, exit) => self.released(&id, released, exit),
        }
    }

    fn find(&mut self, id: &str) -> Result<&mut Container, TaskError> {
        let container = self.containers.get_mut(id);
        container.ok_or_else(|| TaskError::not_found(format!("there is no container {id}")))
    }

    /// Returns the state of a container. One of a pod is never paused: when CRI is restarted it does not know that
    /// state, and the kubelet then ends the container.
    fn container_status(&mut self, id: &str) -> Result<ContainerStatus, TaskError> {
        let in_pod = self.sandbox().is_some();
        let mut seen = self.find(id)?.seen();
        if let ContainerPhase::Running { paused } = &mut seen.phase {
            *paused &= !in_pod;
        }
        Ok(seen)
    }

    fn sandbox(&self) -> Option<&Container> {
        let mut containers = self.containers.values();
        containers.find(|container| container.role == Role::Sandbox)
    }

    /// Starts a task that sends its outcome to the actor.
    fn spawn_task(&self, work: impl Future<Output = TaskOutcome> + Send + 'static) {
        let self_sender = self.self_sender.clone();
        tokio::spawn(async move {
            let outcome = work.await;
            if let Some(self_sender) = self_sender.upgrade() {
                let _ = self_sender.send(PodCommand::Outcome(outcome)).await;
            }
        });
    }

    fn stats(&mut self, id: &str) -> Result<CgroupStats, TaskError> {
        let container = self.find(id)?;
        let stats = container.resources.cgroup.as_ref().map(Cgroup::stats);
        Ok(stats.unwrap_or_default())
    }

    fn update(&mut self, id: &str, resources: LinuxResources, reply: Reply<()>) {
        if let Some(container) = self.containers.get_mut(id)
            && matches!(container.role, Role::Launcher(_))
            && container.vm.is_none()
        {
            // There is no cgroup yet.
            container.early_limits = Some(resources);
            return drop(reply.send(Ok(())));
        }
        let cgroup = match self.updatable(id, &resources) {
            Ok(Some(cgroup)) => cgroup,
            done => return drop(reply.send(done.map(drop))),
        };
        tokio::spawn(async move {
            let limited = spawn_blocking(move || cgroup.set_limits(&resources)).await;
            let limited = limited.map_err(|error| TaskError::failed(error.to_string()));
            let _ = reply.send(limited.and_then(|limited| Ok(limited?)));
        });
    }

    /// Returns the cgroup whose limits to set. Refuses limits too small for the VM.
    fn updatable(&mut self, id: &str, resources: &LinuxResources) -> Result<Option<Cgroup>, TaskError> {
        let container = self.find(id)?;
        if let Some(vm) = &container.vm {
            MemoryLimit::of_resources(Some(resources)).check(
                &vm.plan,
                &spec::display_name(&container.spec),
                "the guest's memory",
            )?;
        }
        Ok(container.resources.cgroup.clone())
    }

    fn publish_pause(&self, container_id: String, paused: bool) {
        match paused {
            true => self.publisher.publish(&events::TaskPaused {
                container_id,
                ..Default::default()
            }),
            false => self.publisher.publish(&events::TaskResumed {
                container_id,
                ..Default::default()
            }),
        }
    }
}

#[cfg(test)]
mod tests;
