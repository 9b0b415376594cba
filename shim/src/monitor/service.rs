//! husk.shim.v1 for one VM.

use std::sync::Arc;
use std::time::Duration;

use husk_proto::shim::v1::add_volume_request::Cache;
use husk_proto::shim::v1::pod_server::Pod;
use husk_proto::shim::v1::{
    AddInterfaceRequest, AddInterfaceResponse, AddVolumeRequest, AddVolumeResponse, ConsoleInput,
    InfoRequest, InfoResponse, KillRequest, KillResponse, PauseRequest, PauseResponse,
    RemoveInterfaceRequest, RemoveInterfaceResponse, RemoveVolumeRequest, RemoveVolumeResponse, ResetRequest,
    ResetResponse, ResumeRequest, ResumeResponse, SetLinkRequest, SetLinkResponse, ShutdownRequest,
    ShutdownResponse, Status as VmStatus, WatchStatusRequest,
};
use husk_proto::vmm::v1 as vmm;
use husk_vmi::{CacheMode, DiskSource, NewVolume, VmPlan};
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use super::disks;
use super::handle::{VmHandle, ended};
use super::interfaces;
use super::session::SessionStream;
use super::vmm_link::within;
use crate::console::Console;

/// How long `Info` waits for what only the VMM knows.
const DETAILS_WITHIN: Duration = Duration::from_secs(2);

type StatusStream = dyn Stream<Item = Result<VmStatus, Status>> + Send;

#[derive(Debug)]
pub(super) struct Service {
    plan: Arc<VmPlan>,
    vm: VmHandle,
    disks: disks::Handle,
    interfaces: interfaces::Handle,
    console: Option<Console>,
}

impl Service {
    pub(super) fn new(
        plan: Arc<VmPlan>,
        vm: VmHandle,
        disks: disks::Handle,
        interfaces: interfaces::Handle,
        console: Option<Console>,
    ) -> Service {
        Service {
            plan,
            vm,
            disks,
            interfaces,
            console,
        }
    }
}

#[tonic::async_trait]
impl Pod for Service {
    type ConsoleStream = SessionStream;
    type WatchStatusStream = std::pin::Pin<Box<StatusStream>>;

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
        };
        if let Some(mut running) = running {
            let details = within(DETAILS_WITHIN, running.client.info(vmm::InfoRequest {})).await;
            info.booted_from = details
                .map(|details| details.into_inner().booted_from)
                .unwrap_or_default();
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
        let volume = NewVolume {
            name: request.name,
            source: DiskSource::File(request.path.into()),
            serial: request.serial,
            cache,
            read_only: request.read_only,
            ..NewVolume::default()
        };
        let address = self.disks.add(volume).await?;
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
        let session = console.attach().await.map_err(|_| ended())?;
        Ok(Response::new(SessionStream::new(session, request.into_inner())))
    }

    async fn watch_status(
        &self,
        _: Request<WatchStatusRequest>,
    ) -> Result<Response<Self::WatchStatusStream>, Status> {
        Ok(Response::new(Box::pin(
            WatchStream::new(self.vm.status()).map(Ok),
        )))
    }

    async fn add_interface(
        &self,
        request: Request<AddInterfaceRequest>,
    ) -> Result<Response<AddInterfaceResponse>, Status> {
        self.interfaces.add(request.into_inner()).await?;
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
