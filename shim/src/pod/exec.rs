//! Programs that KubeVirt runs in `compute`: virt-probe for the kubelet's probes, virt-freezer for backups. Husk does
//! not run them: it gives the answer that they would give.

use containerd_shim_protos::events::task as events;
use containerd_shim_protos::protobuf::MessageField;
use std::time::SystemTime;
use tokio::sync::watch;

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

/// The answer of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ExecAnswer {
    exit_status: u32,
    stderr: &'static str,
}

/// A process that was added to a container.
#[derive(Debug)]
pub(super) struct ExecProcess {
    answer: ExecAnswer,
    stdio: Stdio,
    phase: watch::Sender<ContainerPhase>,
}

/// The answer of a program; `None` for one that Husk does not know.
fn answer(args: &[String]) -> Option<ExecAnswer> {
    let (program, args) = args.split_first()?;
    let has = |flag: &str| {
        let value = format!("{flag}=");
        let set = |arg: &&String| *arg == flag || arg.starts_with(&value);
        args.iter().find(set).is_some_and(|arg| !arg.ends_with("=false"))
    };
    match program.rsplit('/').next()? {
        "virt-probe" => Some(ExecAnswer {
            exit_status: 1,
            stderr: "the guest agent is not connected\n",
        }),
        "virt-freezer" if !has("--freeze") && !has("--unfreeze") => Some(ExecAnswer {
            exit_status: 1,
            stderr: "either --freeze or --unfreeze must be set\n",
        }),
        "virt-freezer" if !has("--name") || !has("--namespace") => Some(ExecAnswer {
            exit_status: 1,
            stderr: "both --name and --namespace must be provided\n",
        }),
        // As virt-freezer does without an agent: the disks are consistent as after a power failure.
        "virt-freezer" => Some(ExecAnswer {
            exit_status: 0,
            stderr: "no guest agent: the file systems are not frozen\n",
        }),
        _ => None,
    }
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
        let Some(answer) = answer(&args).filter(|_| runs_vm) else {
            let text = "exec is not supported: attach to the console or use the network";
            return Err(TaskError::unimplemented(text));
        };
        if container.execs.contains_key(&exec_id) {
            return Err(TaskError::exists(format!("there is a process {exec_id} already")));
        }
        let phase = watch::Sender::new(ContainerPhase::Created);
        let process = ExecProcess { answer, stdio, phase };
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
            let pid = container.pid;
            let process = container.exec(exec_id)?;
            let created = process.phase.send_if_modified(|phase| {
                let created = *phase == ContainerPhase::Created;
                if created {
                    *phase = ContainerPhase::Running { paused: false };
                }
                created
            });
            match created {
                true => Ok((pid, process.answer, process.stdio.clone())),
                false => Err(TaskError::precondition(format!(
                    "process {exec_id} was already started"
                ))),
            }
        });
        let (pid, answer, stdio) = match found {
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
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        self.spawn_task(async move {
            stdio.print(answer.stderr).await;
            TaskOutcome::ExecEnded(id, exec_id)
        });
    }

    /// Ends a process that was not started. One that was ends by itself.
    pub(super) fn kill_exec(&mut self, id: &str, exec_id: &str) -> Result<(), TaskError> {
        let process = self.find(id)?.exec(exec_id)?;
        if *process.phase.borrow() == ContainerPhase::Created {
            self.record_exec_exit(id, exec_id, Some(signals::KILLED));
        }
        Ok(())
    }

    pub(super) fn exec_ended(&mut self, id: &str, exec_id: &str) {
        self.record_exec_exit(id, exec_id, None);
    }

    /// Records the exit of a process, with its own status unless another is given.
    fn record_exec_exit(&mut self, id: &str, exec_id: &str, status: Option<u32>) {
        let Some(container) = self.containers.get(id) else {
            return;
        };
        let Some(process) = container.execs.get(exec_id) else {
            return;
        };
        let exit = ContainerExit {
            pid: container.pid,
            status: status.unwrap_or(process.answer.exit_status),
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

    pub(super) fn look_exec(&mut self, id: &str, exec_id: &str) -> Result<ContainerStatus, TaskError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_kubevirt_are_answered() {
        let status = |args: &str| {
            let args: Vec<String> = args.split(' ').map(str::to_owned).collect();
            answer(&args).map(|answer| answer.exit_status)
        };
        assert_eq!(status("virt-probe --domainName a_b --guestAgentPing"), Some(1));
        let freezer = "/usr/bin/virt-freezer --name vm --namespace default";
        assert_eq!(status(&format!("{freezer} --freeze")), Some(0));
        assert_eq!(status(&format!("{freezer} --unfreeze=true")), Some(0));
        assert_eq!(status(freezer), Some(1));
        assert_eq!(status(&format!("{freezer} --freeze=false")), Some(1));
        assert_eq!(status("virt-freezer --freeze"), Some(1));
        assert_eq!(status("/bin/sh -c true"), None);
    }
}
