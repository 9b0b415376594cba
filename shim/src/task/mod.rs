//! containerd's Task service. Each call becomes a request to the pod's actor.

mod metrics;

use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, PauseRequest,
    PidsRequest, PidsResponse, ProcessInfo, ResizePtyRequest, ResumeRequest, ShutdownRequest, StartRequest,
    StartResponse, StateRequest, StateResponse, StatsRequest, StatsResponse, Status, UpdateTaskRequest,
    WaitRequest, WaitResponse,
};
use containerd_shim_protos::protobuf::{EnumOrUnknown, MessageField};
use containerd_shim_protos::shim_async::Task;
use containerd_shim_protos::ttrpc;
use containerd_shim_protos::ttrpc::r#async::TtrpcContext;
use oci_spec::runtime::Process;

use crate::pod::{ContainerPhase, ExecRequest, PodCommand, PodHandle, TaskError};
use crate::publisher::timestamp;
use crate::stdio::Stdio;

/// The service. It has no state of its own.
#[derive(Debug)]
pub(crate) struct Service {
    pod: PodHandle,
}

impl Service {
    pub(crate) fn new(pod: PodHandle) -> Service {
        Service { pod }
    }
}

type Answer<T> = ttrpc::Result<T>;

#[async_trait::async_trait]
impl Task for Service {
    async fn create(&self, _: &TtrpcContext, request: CreateTaskRequest) -> Answer<CreateTaskResponse> {
        if !request.checkpoint.is_empty() {
            return Err(TaskError::unimplemented("a VM is not restored from a checkpoint").into());
        }
        let pid = self
            .pod
            .ask(|reply| PodCommand::Create(Box::new(request), reply))
            .await?;
        Ok(CreateTaskResponse {
            pid,
            ..Default::default()
        })
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> Answer<StartResponse> {
        let StartRequest { id, exec_id, .. } = request;
        let pid = match exec_id.is_empty() {
            true => self.pod.ask(|reply| PodCommand::Start(id, reply)).await?,
            false => {
                self.pod
                    .ask(|reply| PodCommand::StartExec(id, exec_id, reply))
                    .await?
            }
        };
        Ok(StartResponse {
            pid,
            ..Default::default()
        })
    }

    async fn delete(&self, _: &TtrpcContext, request: DeleteRequest) -> Answer<DeleteResponse> {
        let DeleteRequest { id, exec_id, .. } = request;
        let exit = match exec_id.is_empty() {
            true => self.pod.ask(|reply| PodCommand::Delete(id, reply)).await?,
            false => {
                self.pod
                    .ask(|reply| PodCommand::DeleteExec(id, exec_id, reply))
                    .await?
            }
        };
        Ok(DeleteResponse {
            pid: exit.pid,
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        })
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> Answer<Empty> {
        if !request.exec_id.is_empty() {
            self.pod
                .ask(|reply| PodCommand::KillExec(request.id, request.exec_id, request.signal, reply))
                .await?;
            return Ok(Empty::default());
        }
        self.pod
            .ask(|reply| PodCommand::Kill(request.id, request.signal, reply))
            .await?;
        Ok(Empty::default())
    }

    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> Answer<StateResponse> {
        let exec_id = request.exec_id.clone();
        let seen = self.pod.container_status(request.id, request.exec_id).await?;
        let status = match &seen.phase {
            ContainerPhase::Creating | ContainerPhase::Created => Status::CREATED,
            ContainerPhase::Running { paused: false } => Status::RUNNING,
            ContainerPhase::Running { paused: true } => Status::PAUSED,
            ContainerPhase::Stopped(_) => Status::STOPPED,
        };
        let mut response = StateResponse {
            id: seen.id,
            exec_id,
            bundle: seen.bundle.display().to_string(),
            pid: seen.pid,
            status: EnumOrUnknown::new(status),
            stdin: seen.stdio.stdin,
            stdout: seen.stdio.stdout,
            stderr: seen.stdio.stderr,
            terminal: seen.stdio.terminal,
            ..Default::default()
        };
        if let ContainerPhase::Stopped(exit) = &seen.phase {
            response.exit_status = exit.status;
            response.exited_at = MessageField::some(timestamp(exit.at));
        }
        Ok(response)
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> Answer<WaitResponse> {
        let exit = self.pod.exit(request.id, request.exec_id).await?;
        Ok(WaitResponse {
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        })
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> Answer<PidsResponse> {
        let seen = self
            .pod
            .ask(|reply| PodCommand::ContainerStatus(request.id, reply))
            .await?;
        let processes = seen.processes.into_iter().map(|pid| ProcessInfo {
            pid,
            ..Default::default()
        });
        Ok(PidsResponse {
            processes: processes.collect(),
            ..Default::default()
        })
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> Answer<Empty> {
        self.pod.pause(request.id, true).await?;
        Ok(Empty::default())
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> Answer<Empty> {
        self.pod.pause(request.id, false).await?;
        Ok(Empty::default())
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> Answer<StatsResponse> {
        let stats = self.pod.ask(|reply| PodCommand::Stats(request.id, reply)).await?;
        Ok(StatsResponse {
            stats: MessageField::some(metrics::metrics(&stats)?),
            ..Default::default()
        })
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> Answer<Empty> {
        let json = request.resources.into_option().unwrap_or_default().value;
        let resources = serde_json::from_slice(&json)
            .map_err(|error| TaskError::invalid(format!("invalid resources: {error}")))?;
        self.pod
            .ask(|reply| PodCommand::Update(request.id, Box::new(resources), reply))
            .await?;
        Ok(Empty::default())
    }

    async fn connect(&self, _: &TtrpcContext, request: ConnectRequest) -> Answer<ConnectResponse> {
        let seen = self
            .pod
            .ask(|reply| PodCommand::ContainerStatus(request.id, reply))
            .await?;
        Ok(ConnectResponse {
            shim_pid: std::process::id(),
            task_pid: seen.pid,
            version: env!("CARGO_PKG_VERSION").into(),
            ..Default::default()
        })
    }

    async fn shutdown(&self, _: &TtrpcContext, request: ShutdownRequest) -> Answer<Empty> {
        self.pod
            .ask(|reply| PodCommand::Shutdown {
                now: request.now,
                reply,
            })
            .await?;
        Ok(Empty::default())
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> Answer<Empty> {
        if !request.exec_id.is_empty() {
            // No process reads its input.
            self.pod.container_status(request.id, request.exec_id).await?;
        } else if request.stdin {
            self.pod
                .ask(|reply| PodCommand::CloseStdin(request.id, reply))
                .await?;
        }
        Ok(Empty::default())
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: ResizePtyRequest) -> Answer<Empty> {
        // A serial line has no window size.
        self.pod.container_status(request.id, request.exec_id).await?;
        Ok(Empty::default())
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> Answer<Empty> {
        let spec = request.spec.into_option().unwrap_or_default().value;
        let process: Process = serde_json::from_slice(&spec)
            .map_err(|error| TaskError::invalid(format!("invalid process: {error}")))?;
        let exec = ExecRequest {
            id: request.id,
            exec_id: request.exec_id,
            args: process.args().clone().unwrap_or_default(),
            stdio: Stdio {
                stdin: request.stdin,
                stdout: request.stdout,
                stderr: request.stderr,
                terminal: request.terminal,
            },
        };
        self.pod.ask(|reply| PodCommand::Exec(exec, reply)).await?;
        Ok(Empty::default())
    }

    async fn checkpoint(&self, _: &TtrpcContext, request: CheckpointTaskRequest) -> Answer<Empty> {
        self.pod
            .ask(|reply| PodCommand::ContainerStatus(request.id, reply))
            .await?;
        Err(TaskError::unimplemented("a VM has no checkpoints").into())
    }
}
