//! The gRPC service husk.vmm.v1.Vmm. Every call is a message to the machine's thread; what takes long is done
//! here.

use std::pin::Pin;
use std::sync::Arc;

use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::vmm_server::Vmm;
use husk_proto::vmm::v1::{self as pb, PauseReason};
use husk_seccomp::{ThreadRole, install};
use husk_virtio_net::NetSetup;
use husk_virtio_scsi::ScsiHandle;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio_stream::{
    Stream, StreamExt,
    wrappers::{BroadcastStream, ReceiverStream},
};
use tonic::{Request, Response, Status};

use super::config::{self, VmParts};
use super::disks::{self, MachineDisks};
use super::fields::missing;
use super::ports::{EventStream, PortStates};
use super::precopy::{self, CopyPass};
use super::saved::{self, CapturedVm};
use super::vm::Message;
use super::vsock::{self, VsockCommand};
use super::{discs, fields, nics};
use crate::ram::{CopyGate, PageMap};

/// The sender of a command's answer.
pub type Reply<T> = oneshot::Sender<Result<T, Status>>;

/// Calls of the monitor.
#[derive(Debug)]
pub enum VmmCommand {
    /// Builds the machine.
    Create(Box<VmParts>, Reply<()>),
    /// Loads the kernel and starts the vCPUs, or stays paused.
    Boot { paused: bool, reply: Reply<()> },
    /// Stops vCPUs and device workers, for a reason.
    Pause(PauseReason, Reply<()>),
    /// Takes a reason to be paused back.
    Resume(PauseReason, Reply<()>),
    /// Begins to copy guest memory while the VM runs. Returns the first pass.
    StartPrecopy(Reply<CopyPass>),
    /// Returns the next pass of this copy, after one has ended.
    NextPass {
        gate: Arc<CopyGate>,
        reply: Reply<CopyPass>,
    },
    /// Ends the passes of this copy. If they are complete, a save may follow.
    EndPrecopy {
        gate: Arc<CopyGate>,
        complete: bool,
        reply: Reply<()>,
    },
    /// Returns the state of the paused machine, and the pages written since a copy of its memory if `precopied`.
    Save {
        precopied: bool,
        reply: Reply<CapturedVm>,
    },
    /// Presses the power button. With `reboot`, the guest's power-off resets the machine.
    Shutdown { reboot: bool, reply: Reply<()> },
    /// Resets the machine.
    Reset(Reply<()>),
    /// Ends the VM.
    Stop(Reply<()>),
    /// Describes the VM but for its SCSI disks, and returns the controller of these.
    Info(Reply<(pb::InfoResponse, Option<ScsiHandle>)>),
    /// Returns events that tell what holds already, and a receiver of the events after them.
    Subscribe(Reply<(Vec<pb::Event>, broadcast::Receiver<pb::Event>)>),
    /// Sets the balloon's target in bytes.
    SetBalloon(u64, Reply<()>),
    /// Returns the handles of the disks.
    Disks(Reply<MachineDisks>),
    /// Plugs a NIC, into a slot if it is given. Returns its PCI slot.
    AddNic(Box<NetSetup>, Option<u8>, Reply<u32>),
    /// Asks the guest to eject the NIC with this id. The receiver is answered when it has.
    RemoveNic(String, Reply<oneshot::Receiver<()>>),
    /// Sets the link of the NIC with this id.
    SetLink { id: String, up: bool, reply: Reply<()> },
    /// Begins a connection of the vsock device.
    Vsock(VsockCommand, Reply<()>),
    /// Returns the guest's requests for such connections, once.
    VsockRequests(Reply<mpsc::Receiver<pb::VsockRequest>>),
}

/// The service.
#[derive(Clone, Debug)]
pub struct VmmService {
    pub(super) messages: std::sync::mpsc::Sender<Message>,
    /// Descriptors that the monitor sends.
    pub(super) fds: FdReceiver,
    pub(super) ports: watch::Receiver<PortStates>,
    pub(super) pagemap: Option<Arc<PageMap>>,
}

impl VmmService {
    pub(super) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> VmmCommand) -> Result<T, Status> {
        let gone = || Status::unavailable("the VM has ended");
        let (reply, answer) = oneshot::channel();
        let message = Message::Command(command(reply));
        self.messages.send(message).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Takes the state of the paused VM, and the handles of its disks.
    async fn capture(&self, precopied: bool) -> Result<(CapturedVm, MachineDisks), Status> {
        let disks = self.ask(VmmCommand::Disks).await?;
        let captured = self.ask(|reply| VmmCommand::Save { precopied, reply }).await?;
        Ok((captured, disks))
    }
}

/// Carries out an operation whole, even if its caller gives up.
async fn detached<T: Send + 'static>(
    operation: impl Future<Output = Result<T, Status>> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::spawn(operation).await;
    done.map_err(|e| Status::internal(e.to_string()))?
}

#[tonic::async_trait]
impl Vmm for VmmService {
    type EventsStream = Pin<Box<dyn Stream<Item = Result<pb::Event, Status>> + Send>>;
    type PrecopyStream = Pin<Box<dyn Stream<Item = Result<pb::SaveProgress, Status>> + Send>>;
    type SaveStream = Pin<Box<dyn Stream<Item = Result<pb::SaveProgress, Status>> + Send>>;
    type VsockRequestsStream = Pin<Box<dyn Stream<Item = Result<pb::VsockRequest, Status>> + Send>>;

    async fn create(
        &self,
        request: Request<pb::CreateRequest>,
    ) -> Result<Response<pb::CreateResponse>, Status> {
        let request = request.into_inner();
        let service = self.clone();
        detached(async move {
            let parts = Box::new(config::parts(request, &service.fds).await?);
            service.ask(|reply| VmmCommand::Create(parts, reply)).await?;
            // The threads of the machine have theirs. This one has read no input of the guest yet.
            install(ThreadRole::Control);
            Ok(())
        })
        .await?;
        Ok(Response::new(pb::CreateResponse {}))
    }

    async fn boot(&self, request: Request<pb::BootRequest>) -> Result<Response<pb::BootResponse>, Status> {
        let paused = request.into_inner().paused;
        self.ask(|reply| VmmCommand::Boot { paused, reply }).await?;
        Ok(Response::new(pb::BootResponse {}))
    }

    async fn pause(&self, request: Request<pb::PauseRequest>) -> Result<Response<pb::PauseResponse>, Status> {
        let reason = request.into_inner().reason();
        if matches!(reason, PauseReason::IoError | PauseReason::Watchdog) {
            return Err(fields::invalid("reason", "only user and snapshot can be given"));
        }
        self.ask(|reply| VmmCommand::Pause(reason, reply)).await?;
        Ok(Response::new(pb::PauseResponse {}))
    }

    async fn resume(
        &self,
        request: Request<pb::ResumeRequest>,
    ) -> Result<Response<pb::ResumeResponse>, Status> {
        let reason = request.into_inner().reason();
        self.ask(|reply| VmmCommand::Resume(reason, reply)).await?;
        Ok(Response::new(pb::ResumeResponse {}))
    }

    async fn precopy(
        &self,
        request: Request<pb::PrecopyRequest>,
    ) -> Result<Response<Self::PrecopyStream>, Status> {
        let memory = saved::empty(&self.fds, "memory", request.into_inner().memory.as_ref()).await?;
        let stream = detached(precopy::start(self.clone(), memory)).await?;
        Ok(Response::new(Box::pin(stream)))
    }

    async fn save(&self, request: Request<pb::SaveRequest>) -> Result<Response<Self::SaveStream>, Status> {
        let request = request.into_inner();
        let precopied = request.precopied;
        let files = saved::files(&self.fds, &request).await?;
        let service = self.clone();
        let stream = detached(async move {
            match service.capture(precopied).await {
                Ok((captured, disks)) => saved::write(captured, files, disks, service.pagemap.clone()).await,
                Err(refused) => {
                    saved::close(files);
                    Err(refused)
                }
            }
        });
        Ok(Response::new(Box::pin(stream.await?)))
    }

    async fn shutdown(
        &self,
        request: Request<pb::ShutdownRequest>,
    ) -> Result<Response<pb::ShutdownResponse>, Status> {
        let reboot = request.into_inner().reboot;
        self.ask(|reply| VmmCommand::Shutdown { reboot, reply }).await?;
        Ok(Response::new(pb::ShutdownResponse {}))
    }

    async fn reset(&self, _: Request<pb::ResetRequest>) -> Result<Response<pb::ResetResponse>, Status> {
        self.ask(VmmCommand::Reset).await?;
        Ok(Response::new(pb::ResetResponse {}))
    }

    async fn stop(&self, _: Request<pb::StopRequest>) -> Result<Response<pb::StopResponse>, Status> {
        self.ask(VmmCommand::Stop).await?;
        Ok(Response::new(pb::StopResponse {}))
    }

    async fn info(&self, _: Request<pb::InfoRequest>) -> Result<Response<pb::InfoResponse>, Status> {
        let (mut info, scsi) = self.ask(VmmCommand::Info).await?;
        if let Some(scsi) = scsi {
            info.disks = disks::list(info.disks, scsi).await;
        }
        Ok(Response::new(info))
    }

    async fn events(&self, _: Request<pb::EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        let (present, rest) = self.ask(VmmCommand::Subscribe).await?;
        // The stream of a monitor that falls behind ends: it never skips events. The monitor subscribes again.
        let rest = BroadcastStream::new(rest).map(|e| e.map_err(|e| Status::data_loss(e.to_string())));
        let present = tokio_stream::iter(present.into_iter().map(Ok));
        let stream = present.chain(EventStream::new(self.ports.clone(), rest));
        Ok(Response::new(Box::pin(stream)))
    }

    async fn set_balloon(
        &self,
        request: Request<pb::SetBalloonRequest>,
    ) -> Result<Response<pb::SetBalloonResponse>, Status> {
        let bytes = request.into_inner().bytes;
        self.ask(|reply| VmmCommand::SetBalloon(bytes, reply)).await?;
        Ok(Response::new(pb::SetBalloonResponse {}))
    }

    async fn add_disk(
        &self,
        request: Request<pb::AddDiskRequest>,
    ) -> Result<Response<pb::AddDiskResponse>, Status> {
        let disks = self.ask(VmmCommand::Disks).await?;
        // Not detached: the monitor gives up an image that takes long to open, and then nothing may be added.
        let added = disks::add(&self.fds, disks, request.into_inner().disk).await?;
        Ok(Response::new(added))
    }

    async fn remove_disk(
        &self,
        request: Request<pb::RemoveDiskRequest>,
    ) -> Result<Response<pb::RemoveDiskResponse>, Status> {
        let disks = self.ask(VmmCommand::Disks).await?;
        let removed = detached(disks::remove(disks.scsi, request.into_inner().id)).await?;
        Ok(Response::new(removed))
    }

    async fn resize_disk(
        &self,
        request: Request<pb::ResizeDiskRequest>,
    ) -> Result<Response<pb::ResizeDiskResponse>, Status> {
        let disks = self.ask(VmmCommand::Disks).await?;
        let bytes = detached(disks::resize(disks, request.into_inner().id)).await?;
        Ok(Response::new(pb::ResizeDiskResponse { bytes }))
    }

    async fn insert_disc(
        &self,
        request: Request<pb::InsertDiscRequest>,
    ) -> Result<Response<pb::InsertDiscResponse>, Status> {
        let disc = request.into_inner().disc.ok_or_else(|| missing("disc"))?;
        let disks = self.ask(VmmCommand::Disks).await?;
        // Not detached, as in `add_disk`.
        let bytes = discs::insert(&self.fds, disks.scsi, disc).await?;
        Ok(Response::new(pb::InsertDiscResponse { bytes }))
    }

    async fn eject_disc(
        &self,
        request: Request<pb::EjectDiscRequest>,
    ) -> Result<Response<pb::EjectDiscResponse>, Status> {
        let disks = self.ask(VmmCommand::Disks).await?;
        detached(discs::eject(disks.scsi, request.into_inner().id)).await?;
        Ok(Response::new(pb::EjectDiscResponse {}))
    }

    async fn add_nic(
        &self,
        request: Request<pb::AddNicRequest>,
    ) -> Result<Response<pb::AddNicResponse>, Status> {
        let nic = request.into_inner().nic.ok_or_else(|| missing("nic"))?;
        let setup = Box::new(nics::setup(&self.fds, "nic", &nic).await?);
        let slot = nics::slot(&nic)?;
        let pci_slot = self.ask(|reply| VmmCommand::AddNic(setup, slot, reply)).await?;
        Ok(Response::new(pb::AddNicResponse { pci_slot }))
    }

    async fn remove_nic(
        &self,
        request: Request<pb::RemoveNicRequest>,
    ) -> Result<Response<pb::RemoveNicResponse>, Status> {
        let id = request.into_inner().id;
        let gone = self.ask(|reply| VmmCommand::RemoveNic(id.clone(), reply)).await?;
        nics::removed(id, gone).await?;
        Ok(Response::new(pb::RemoveNicResponse {}))
    }

    async fn set_link(
        &self,
        request: Request<pb::SetLinkRequest>,
    ) -> Result<Response<pb::SetLinkResponse>, Status> {
        let pb::SetLinkRequest { id, up } = request.into_inner();
        self.ask(|reply| VmmCommand::SetLink { id, up, reply }).await?;
        Ok(Response::new(pb::SetLinkResponse {}))
    }

    async fn connect_vsock(
        &self,
        request: Request<pb::ConnectVsockRequest>,
    ) -> Result<Response<pb::ConnectVsockResponse>, Status> {
        let command = vsock::connect(&self.fds, request.into_inner()).await?;
        self.ask(|reply| VmmCommand::Vsock(command, reply)).await?;
        Ok(Response::new(pb::ConnectVsockResponse {}))
    }

    async fn vsock_requests(
        &self,
        _: Request<pb::VsockRequestsRequest>,
    ) -> Result<Response<Self::VsockRequestsStream>, Status> {
        let requests = self.ask(VmmCommand::VsockRequests).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(requests).map(Ok))))
    }

    async fn answer_vsock(
        &self,
        request: Request<pb::AnswerVsockRequest>,
    ) -> Result<Response<pb::AnswerVsockResponse>, Status> {
        let command = vsock::answer(&self.fds, request.into_inner()).await?;
        self.ask(|reply| VmmCommand::Vsock(command, reply)).await?;
        Ok(Response::new(pb::AnswerVsockResponse {}))
    }
}
