//! Programs that KubeVirt runs in `compute`: virt-probe for the kubelet's probes, virt-freezer for backups. Husk does
//! not run them: it gives the answer that they would give.

mod answer;
mod program;

use containerd_shim_protos::events::task as events;
use containerd_shim_protos::protobuf::MessageField;
use std::time::SystemTime;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use self::answer::answer;
use self::program::{Program, program};
use super::Pod;
use super::command::TaskOutcome;
use super::container::{Container, ContainerExit, ContainerPhase, ContainerStatus};
use super::signals;
use super::task_error::{Reply, TaskError};
use crate::publisher::timestamp;
use crate::spec::Role;
use crate::stdio::Stdio;

/// A process to add to a container.
#[derive(Debug)]
pub(crate) struct ExecRequest {
    /// The container.
    pub(crate) id: String,
    pub(crate) exec_id: String,
    pub(crate) args: Vec<String>,
    pub(crate) stdio: Stdio,
}

/// A process that was added to a container.
#[derive(Debug)]
pub(super) struct ExecProcess {
    program: Program,
    stdio: Stdio,
    phase: watch::Sender<ContainerPhase>,
    /// The task that answers, once it was started.
    answering: Option<AbortHandle>,
}

impl Pod {
    pub(super) fn exec(&mut self, request: ExecRequest) -> Result<(), TaskError> {
        let ExecRequest {
            id,
            exec_id,
            args,
            stdio,
        } = request;
        let container = self.find(&id)?;
        if !container.is_running() {
            return Err(TaskError::precondition(format!("container {id} is not running")));
        }
        let runs_vm = matches!(container.role, Role::Launcher(_) | Role::Vm);
        let Some(program) = program(&args).filter(|_| runs_vm) else {
            let text = "exec is not supported: attach to the console or use the network";
            return Err(TaskError::unimplemented(text));
        };
        if container.execs.contains_key(&exec_id) {
            return Err(TaskError::exists(format!("there is a process {exec_id} already")));
        }
        let phase = watch::Sender::new(ContainerPhase::Created);
        let process = ExecProcess {
            program,
            stdio,
            phase,
            answering: None,
        };
        container.execs.insert(exec_id.clone(), process);
        self.publisher.publish(&events::TaskExecAdded {
            container_id: id,
            exec_id,
            ..Default::default()
        });
        Ok(())
    }

    pub(super) fn start_exec(&mut self, id: &str, exec_id: &str, reply: Reply<u32>) {
        let found = self.find(id).and_then(|container| {
            let (pid, vm) = (container.pid, container.vm.as_ref());
            let vm = vm.map(|vm| (vm.handle.clone(), vm.agent.clone()));
            let process = container.exec(exec_id)?;
            let created = process.phase.send_if_modified(|phase| {
                let created = *phase == ContainerPhase::Created;
                if created {
                    *phase = ContainerPhase::Running { paused: false };
                }
                created
            });
            match created {
                true => Ok((pid, process.program.clone(), process.stdio.clone(), vm)),
                false => Err(TaskError::precondition(format!(
                    "process {exec_id} was already started"
                ))),
            }
        });
        let (pid, program, stdio, vm) = match found {
            Ok(found) => found,
            Err(error) => return drop(reply.send(Err(error))),
        };
        self.publisher.publish(&events::TaskExecStarted {
            container_id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            pid,
            ..Default::default()
        });
        let _ = reply.send(Ok(pid));
        let (of, process) = (id.to_owned(), exec_id.to_owned());
        let task = self.spawn_task(async move {
            let answer = answer(program, vm).await;
            stdio.print(&answer.stdout, &answer.stderr).await;
            TaskOutcome::ExecEnded(of, process, answer.exit_status)
        });
        if let Ok(process) = self.find(id).and_then(|container| container.exec(exec_id)) {
            process.answering = Some(task);
        }
    }

    /// Ends a process, whatever the signal: it has no handlers.
    pub(super) fn kill_exec(&mut self, id: &str, exec_id: &str) -> Result<(), TaskError> {
        let process = self.find(id)?.exec(exec_id)?;
        if let Some(answering) = process.answering.take() {
            answering.abort();
        }
        self.exec_ended(id, exec_id, signals::KILLED);
        Ok(())
    }

    /// Records the exit of a process, unless it has ended before.
    pub(super) fn exec_ended(&mut self, id: &str, exec_id: &str, status: u32) {
        let Some(container) = self.containers.get(id) else {
            return;
        };
        let Some(process) = container.execs.get(exec_id) else {
            return;
        };
        if matches!(*process.phase.borrow(), ContainerPhase::Stopped(_)) {
            return;
        }
        let exit = ContainerExit {
            pid: container.pid,
            status,
            at: SystemTime::now(),
        };
        process.phase.send_replace(ContainerPhase::Stopped(exit));
        self.publisher.publish(&events::TaskExit {
            container_id: id.to_owned(),
            id: exec_id.to_owned(),
            pid: exit.pid,
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        });
    }

    pub(super) fn delete_exec(&mut self, id: &str, exec_id: &str) -> Result<ContainerExit, TaskError> {
        let container = self.find(id)?;
        let never_started = ContainerExit {
            pid: container.pid,
            status: 0,
            at: SystemTime::now(),
        };
        let phase = *container.exec(exec_id)?.phase.borrow();
        let exit = match phase {
            ContainerPhase::Stopped(exit) => exit,
            ContainerPhase::Running { .. } => {
                let text = format!("process {exec_id} has not ended");
                return Err(TaskError::precondition(text));
            }
            _ => never_started,
        };
        container.execs.remove(exec_id);
        Ok(exit)
    }

    pub(super) fn exec_status(&mut self, id: &str, exec_id: &str) -> Result<ContainerStatus, TaskError> {
        let container = self.find(id)?;
        let (bundle, pid) = (container.bundle.clone(), container.pid);
        let process = container.exec(exec_id)?;
        Ok(ContainerStatus {
            id: exec_id.to_owned(),
            bundle,
            pid,
            phase: *process.phase.borrow(),
            stdio: process.stdio.clone(),
            processes: Vec::new(),
            changes: process.phase.subscribe(),
            vm: None,
        })
    }
}

impl Container {
    fn exec(&mut self, exec_id: &str) -> Result<&mut ExecProcess, TaskError> {
        let process = self.execs.get_mut(exec_id);
        process.ok_or_else(|| TaskError::not_found(format!("there is no process {exec_id}")))
    }
}
