//! Starting containers: the VM boots.

use std::io;

use containerd_shim_protos::events::task as events;
use husk_monitor::monitor::{EmbeddedVm, EmbeddedVmError};
use tracing::warn;

use super::Pod;
use super::command::TaskOutcome;
use super::container::ContainerPhase;
use super::task_error::{Reply, TaskError};
use crate::spec::Role;
use crate::stdio::Streams;

impl Pod {
    pub(super) fn start(&mut self, id: &str, reply: Reply<u32>) {
        let found = self
            .find(id)
            .and_then(|container| match *container.phase.borrow() {
                ContainerPhase::Created => Ok((
                    container.role.clone(),
                    container.vm.as_mut().map(|vm| vm.embedded_vm.take()),
                )),
                ContainerPhase::Stopped(_) => Err(TaskError::precondition(format!(
                    "container {id} has ended already"
                ))),
                _ => Err(TaskError::precondition(format!(
                    "container {id} was already started"
                ))),
            });
        let (role, vm) = match found {
            Ok(found) => found,
            Err(error) => return drop(reply.send(Err(error))),
        };
        match vm {
            None => self.start_without_vm(id, role, reply),
            Some(None) => {
                let _ = reply.send(Err(TaskError::precondition(format!(
                    "container {id} is being started"
                ))));
            }
            Some(Some(mut embedded_vm)) => {
                let id = id.to_owned();
                self.spawn_task(async move {
                    let booted = embedded_vm.boot().await;
                    TaskOutcome::Booted(id, Box::new(embedded_vm), booted, reply)
                });
            }
        }
    }

    fn start_without_vm(&mut self, id: &str, role: Role, reply: Reply<u32>) {
        match role {
            Role::Launcher(args) => self.launch(id, args, reply),
            Role::NoOp => {
                self.started(id, reply);
                self.record_exit(id, 0);
            }
            Role::ConsoleLog => {
                self.started(id, reply);
                self.connect_console_logs();
            }
            Role::LauncherVolume(_) => {
                self.started(id, reply);
                if self.launcher_ended {
                    self.record_exit(id, 0);
                }
            }
            Role::Sandbox | Role::Volume(_) | Role::Vm => self.started(id, reply),
        }
    }

    /// Keeps the connected console of a container that prints it, if it still runs.
    pub(super) fn console_connected(&mut self, id: &str, connected: io::Result<Streams>) {
        match (connected, self.containers.get_mut(id)) {
            (Ok(streams), Some(container)) if container.is_running() => {
                container.console_output = Some(streams);
            }
            (Ok(_), _) => {}
            (Err(error), _) => warn!(id, %error, "the console cannot be printed"),
        }
    }

    pub(super) fn booted(
        &mut self,
        id: &str,
        embedded_vm: EmbeddedVm,
        booted: Result<(), EmbeddedVmError>,
        reply: Reply<u32>,
    ) {
        drop(embedded_vm);
        match booted {
            Ok(()) => self.started(id, reply),
            // The exit of the VM is reported separately.
            Err(error) => drop(reply.send(Err(TaskError::failed(error.to_string())))),
        }
    }

    pub(super) fn started(&mut self, id: &str, reply: Reply<u32>) {
        let Some(container) = self.containers.get(id) else {
            return;
        };
        // A short-lived guest may have ended already. Its exit follows.
        container.phase.send_if_modified(|phase| {
            let created = *phase == ContainerPhase::Created;
            if created {
                *phase = ContainerPhase::Running { paused: false };
            }
            created
        });
        self.publisher.publish(&events::TaskStart {
            container_id: id.to_owned(),
            pid: container.pid,
            ..Default::default()
        });
        let _ = reply.send(Ok(container.pid));
    }
}
