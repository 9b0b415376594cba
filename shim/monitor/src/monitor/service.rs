//! The gRPC service `husk.shim.v1` of one VM.

use std::sync::Arc;
use std::time::Duration;

use husk_proto::fds::FdReceiver;
use husk_proto::shim::v1::add_volume_request::Cache;
use husk_proto::shim::v1::pod_server::Pod;
use husk_proto::shim::v1::{
    AddInterfaceRequest, AddInterfaceResponse, AddVolumeRequest, AddVolumeResponse, ConsoleInput,
    InfoRequest, InfoResponse, KillRequest, KillResponse, PauseRequest, PauseResponse,
    RemoveInterfaceRequest, RemoveInterfaceResponse, RemoveVolumeRequest, RemoveVolumeResponse, ResetRequest,
    ResetResponse, ResumeRequest, ResumeResponse, SetLinkRequest, SetLinkResponse, ShutdownRequest,
    ShutdownResponse, SnapshotProgress, SnapshotRequest, SoftRebootRequest, SoftRebootResponse,
    Status as VmStatus, SyncVmiRequest, SyncVmiResponse, WatchStatusRequest,
};
use husk_proto::vmm::v1 as vmm;
use husk_vmi::{CacheMode, DiskSource, NewVolume, NicDhcp, VmPlan};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use super::console_session::SessionStream;
use super::disks;
use super::guest_agent::AgentHandle;
use super::handle::VmHandle;
use super::interfaces;
use super::metrics::metrics;
use super::snapshots::SnapshotOptions;
use super::status_stream::{StatusSources, watch_status};
use super::sync::VmiSync;
use super::vm_error::VmError;
use super::vmm_connection::call_within;
use super::volume_files::VolumeFiles;
use crate::console::Console;
use crate::vm_environment::VmEnvironment;

/// Maximum time `Info` waits for the VMM.
const DETAILS_WITHIN: Duration = Duration::from_secs(2);

/// The parts that a service is made of.
#[derive(Debug)]
pub(super) struct ServiceParts {
    pub(super) plan: Arc<VmPlan>,
    pub(super) environment: Arc<VmEnvironment>,
    pub(super) vm: VmHandle,
    pub(super) disks: disks::DisksHandle,
    pub(super) interfaces: interfaces::InterfacesHandle,
    pub(super) descriptors: FdReceiver,
    pub(super) console: Option<Console>,
    pub(super) agent: AgentHandle,
}

#[derive(Debug)]
pub(super) struct Service {
    plan: Arc<VmPlan>,
    vm: VmHandle,
    disks: disks::DisksHandle,
    interfaces: interfaces::InterfacesHandle,
    files: VolumeFiles,
    console: Option<Console>,
    agent: AgentHandle,
    sync: VmiSync,
}

/// Maps each error to a gRPC status.
impl From<VmError> for Status {
    fn from(error: VmError) -> Status {
        let code = match error {
            VmError::InvalidArgument(_) => Code::InvalidArgument,
            VmError::WrongState(_) => Code::FailedPrecondition,
            VmError::NotFound(_) => Code::NotFound,
            VmError::AlreadyExists(_) => Code::AlreadyExists,
            VmError::NotPermitted(_) => Code::PermissionDenied,
            VmError::LimitReached(_) => Code::ResourceExhausted,
            VmError::TimedOut(_) => Code::DeadlineExceeded,
            VmError::Unavailable(_) => Code::Unavailable,
            VmError::Internal(_) => Code::Internal,
            VmError::Vmm(_) => Code::Unknown,
        };
        Status::new(code, error.to_string())
    }
}

impl Service {
    pub(super) fn new(parts: ServiceParts) -> Service {
        let ServiceParts {
            plan,
            environment,
            vm,
            disks,
            interfaces,
            descriptors,
            console,
            agent,
        } = parts;
        let files = VolumeFiles::new(descriptors);
        let sync = VmiSync::new(
            plan.clone(),
            environment,
            vm.clone(),
            disks.clone(),
            interfaces.clone(),
            files.clone(),
        );
        Service {
            plan,
            vm,
            disks,
            interfaces,
            files,
            console,
            agent,
            sync,
        }
    }
}

#[tonic::async_trait]
impl Pod for Service {
    type ConsoleStream = SessionStream;
    type WatchStatusStream = ReceiverStream<Result<VmStatus, Status>>;
    type SnapshotStream = ReceiverStream<Result<SnapshotProgress, Status>>;

    async fn info(&self, _: Request<InfoRequest>) -> Result<Response<InfoResponse>, Status> {
        let running = self.vm.running();
        let mut info = InfoResponse {
            namespace: self.plan.namespace.clone(),
            name: self.plan.name.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            monitor_pid: std::process::id(),
            vmm_pid: running.as_ref().map_or(0, |running| running.pid),
            status: Some(self.vm.status().borrow().clone()),
            vcpus: self.plan.topology.vcpus(),
            guest_memory_bytes: self.plan.memory.guest_bytes,
            booted_from: String::new(),
            interfaces: self.interfaces.list(),
            disks: self.disks.watch().borrow().clone(),
            metrics: None,
        };
        if let Some(mut running) = running {
            let said = call_within(DETAILS_WITHIN, running.client.info(vmm::InfoRequest {})).await;
            let said = said.ok().map(Response::into_inner);
            let vhost = self.interfaces.vhost_counters().await;
            info.metrics = Some(metrics(running.pid, said.as_ref(), vhost));
            let said = said.unwrap_or_default();
            for disk in &mut info.disks {
                let other = said.disks.iter().find(|other| other.id == disk.name);
                disk.bytes = other.map(|other| other.bytes).or(disk.bytes);
            }
            info.booted_from = said.booted_from;
        }
        Ok(Response::new(info))
    }

    async fn pause(&self, _: Request<PauseRequest>) -> Result<Response<PauseResponse>, Status> {
        self.vm.pause().await?;
        Ok(Response::new(PauseResponse {}))
    }

    async fn resume(&self, _: Request<ResumeRequest>) -> Result<Response<ResumeResponse>, Status> {
        self.vm.resume().await?;
        Ok(Response::new(ResumeResponse {}))
    }

    async fn reset(&self, _: Request<ResetRequest>) -> Result<Response<ResetResponse>, Status> {
        self.vm.reset().await?;
        Ok(Response::new(ResetResponse {}))
    }

    async fn soft_reboot(
        &self,
        _: Request<SoftRebootRequest>,
    ) -> Result<Response<SoftRebootResponse>, Status> {
        if !self.plan.acpi {
            let text = "the VM has no power button: its manifest sets features.acpi.enabled: false";
            return Err(Status::failed_precondition(text));
        }
        self.vm.soft_reboot().await?;
        Ok(Response::new(SoftRebootResponse {}))
    }

    async fn shutdown(
        &self,
        request: Request<ShutdownRequest>,
    ) -> Result<Response<ShutdownResponse>, Status> {
        let grace_seconds = self.vm.shutdown(request.into_inner().grace_seconds).await?;
        Ok(Response::new(ShutdownResponse { grace_seconds }))
    }

    async fn kill(&self, _: Request<KillRequest>) -> Result<Response<KillResponse>, Status> {
        self.vm.kill().await?;
        Ok(Response::new(KillResponse {}))
    }

    async fn add_volume(
        &self,
        request: Request<AddVolumeRequest>,
    ) -> Result<Response<AddVolumeResponse>, Status> {
        let request = request.into_inner();
        let cache = match request.cache() {
            Cache::Unspecified => CacheMode::Auto,
            Cache::None => CacheMode::None,
            Cache::Writethrough => CacheMode::WriteThrough,
            Cache::Writeback => CacheMode::WriteBack,
        };
        let (source, receive_file) = match &request.fd {
            Some(_) if !request.path.is_empty() => {
                let text = "a volume is given by its path or by a descriptor, not by both";
                return Err(Status::invalid_argument(text));
            }
            Some(fd) => {
                let (fd, id) = self.files.take(&request.name, fd, request.read_only).await?;
                (DiskSource::Descriptor(id), Some(fd))
            }
            None => (DiskSource::File(request.path.into()), None),
        };
        let volume = NewVolume {
            name: request.name,
            source,
            serial: request.serial,
            cache,
            read_only: request.read_only,
            ..NewVolume::default()
        };
        let address = self.disks.add(volume, receive_file).await?;
        Ok(Response::new(AddVolumeResponse {
            target: address.target.into(),
            lun: address.lun.into(),
        }))
    }

    async fn remove_volume(
        &self,
        request: Request<RemoveVolumeRequest>,
    ) -> Result<Response<RemoveVolumeResponse>, Status> {
        let paused = self.vm.status().borrow().paused;
        let removed = self.disks.remove(request.into_inner().name, paused).await?;
        let flush_error = removed.flush_error;
        Ok(Response::new(RemoveVolumeResponse { flush_error }))
    }

    async fn console(
        &self,
        request: Request<Streaming<ConsoleInput>>,
    ) -> Result<Response<SessionStream>, Status> {
        let console = self.console.as_ref().ok_or_else(|| {
            Status::failed_precondition(
                "the VM has no serial console: its manifest sets autoattachSerialConsole: false",
            )
        })?;
        let session = console.attach().await.map_err(|_| VmError::ended())?;
        Ok(Response::new(SessionStream::new(session, request.into_inner())))
    }

    async fn watch_status(
        &self,
        request: Request<WatchStatusRequest>,
    ) -> Result<Response<Self::WatchStatusStream>, Status> {
        let sources = StatusSources {
            status: self.vm.status(),
            disks: self.disks.watch(),
            interfaces: self.interfaces.clone(),
            guest: self.agent.watch(),
            vm: self.vm.clone(),
        };
        let seconds = request.into_inner().metrics_seconds;
        Ok(Response::new(watch_status(sources, seconds)))
    }

    async fn snapshot(
        &self,
        request: Request<SnapshotRequest>,
    ) -> Result<Response<Self::SnapshotStream>, Status> {
        let SnapshotRequest {
            directory,
            resume,
            checksums,
            copy_disks,
            live,
        } = request.into_inner();
        let options = SnapshotOptions {
            directory: directory.into(),
            resume,
            checksums,
            copy_disks,
            live,
        };
        let progress = self.vm.snapshot(options).await?;
        Ok(Response::new(ReceiverStream::new(progress)))
    }

    async fn sync_vmi(&self, request: Request<SyncVmiRequest>) -> Result<Response<SyncVmiResponse>, Status> {
        let done = self.sync.sync(request.into_inner()).await?;
        Ok(Response::new(done))
    }

    async fn add_interface(
        &self,
        request: Request<AddInterfaceRequest>,
    ) -> Result<Response<AddInterfaceResponse>, Status> {
        self.interfaces
            .add(request.into_inner(), NicDhcp::default(), true)
            .await?;
        Ok(Response::new(AddInterfaceResponse {}))
    }

    async fn remove_interface(
        &self,
        request: Request<RemoveInterfaceRequest>,
    ) -> Result<Response<RemoveInterfaceResponse>, Status> {
        let paused = self.vm.status().borrow().paused;
        self.interfaces.remove(request.into_inner().name, paused).await?;
        Ok(Response::new(RemoveInterfaceResponse {}))
    }

    async fn set_link(&self, request: Request<SetLinkRequest>) -> Result<Response<SetLinkResponse>, Status> {
        let SetLinkRequest { name, up } = request.into_inner();
        self.interfaces.set_link(name, up).await?;
        Ok(Response::new(SetLinkResponse {}))
    }
}
