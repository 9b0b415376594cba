//! Programs that KubeVirt runs in `compute`: virt-probe for the kubelet's probes, virt-freezer for backups. Husk does
//! not run them: it gives the answer that they would give.

mod answer;
mod program;

use containerd_shim_protos::events::task as events;
use containerd_shim_protos::protobuf::MessageField;
use husk_monitor::monitor::{AgentHandle, VmHandle};
use std::time::SystemTime;
use tokio::sync::{oneshot, watch};

use self::answer::{Answer, answer};
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
    /// Of a process that was started. Dropping it kills the process.
    pub(super) kill: Option<oneshot::Sender<()>>,
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
            kill: None,
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
        self.start_answered_exec(id, exec_id, reply, answer);
    }

    /// Starts a process whose output and exit status come from `answer`.
    pub(super) fn start_answered_exec<A>(
        &mut self,
        id: &str,
        exec_id: &str,
        reply: Reply<u32>,
        answer: impl FnOnce(Program, Option<(VmHandle, AgentHandle)>) -> A,
    ) where
        A: Future<Output = Answer> + Send + 'static,
    {
        let (kill, killed) = oneshot::channel::<()>();
        let found = self.find(id).and_then(|container| {
            let (pid, vm) = (container.pid, container.vm.as_ref());
            let vm = vm.map(|vm| (vm.handle.clone(), vm.agent.clone()));
            let process = container.exec(exec_id)?;
            if *process.phase.borrow() != ContainerPhase::Created {
                let text = format!("process {exec_id} was already started");
                return Err(TaskError::precondition(text));
            }
            // The other ends wait until the streams are open, even if the process is killed before it answers.
            let streams = process.stdio.open();
            let streams =
                streams.map_err(|error| TaskError::invalid(format!("standard streams: {error}")))?;
            process
                .phase
                .send_replace(ContainerPhase::Running { paused: false });
            process.kill = Some(kill);
            Ok((pid, streams, answer(process.program.clone(), vm)))
        });
        let (pid, streams, answer) = match found {
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
        self.spawn_task(async move {
            let answered = async move {
                let answer = answer.await;
                streams.print(&answer.stdout, &answer.stderr).await;
                answer.exit_status
            };
            // Either way the streams are closed before the exit is recorded.
            let status = tokio::select! {
                status = answered => status,
                _ = killed => signals::KILLED,
            };
            TaskOutcome::ExecEnded(of, process, status)
        });
    }

    /// Sends a process a signal. One that ends processes ends it at once: it has no handlers.
    pub(super) fn kill_exec(&mut self, id: &str, exec_id: &str, signal: u32) -> Result<(), TaskError> {
        let process = self.find(id)?.exec(exec_id)?;
        let phase = *process.phase.borrow();
        if signals::is_of_terminal(signal) {
            return Ok(());
        }
        let Some(status) = signals::signal_exit_status(signal)? else {
            return Ok(());
        };
        match phase {
            // The exit is recorded when the streams are closed.
            ContainerPhase::Running { .. } => process.kill = None,
            _ => self.exec_ended(id, exec_id, status),
        }
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
