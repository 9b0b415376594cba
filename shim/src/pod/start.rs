//! Starting containers: the VM boots.

use containerd_shim_protos::events::task as events;
use husk_monitor::monitor::{EmbeddedVm, EmbeddedVmError};

use super::Pod;
use super::command::TaskOutcome;
use super::container::ContainerPhase;
use super::task_error::{Reply, TaskError};

impl Pod {
    pub(super) fn start(&mut self, id: &str, reply: Reply<u32>) {
        let found = self
            .find(id)
            .and_then(|container| match *container.phase.borrow() {
                ContainerPhase::Created => Ok(container.vm.as_mut().map(|vm| vm.embedded_vm.take())),
                _ => Err(TaskError::precondition(format!(
                    "container {id} was already started"
                ))),
            });
        match found {
            Err(error) => drop(reply.send(Err(error))),
            Ok(None) => self.started(id, reply),
            Ok(Some(None)) => {
                let _ = reply.send(Err(TaskError::precondition(format!(
                    "container {id} is being started"
                ))));
            }
            Ok(Some(Some(mut embedded_vm))) => {
                let id = id.to_owned();
                self.spawn_task(async move {
                    let booted = embedded_vm.boot().await;
                    TaskOutcome::Booted(id, Box::new(embedded_vm), booted, reply)
                });
            }
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

    fn started(&mut self, id: &str, reply: Reply<u32>) {
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
