//! The gRPC service husk.vmm.v1.Vmm. Every call is a message to the control actor.

use std::pin::Pin;

use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::vmm_server::Vmm;
use husk_proto::vmm::v1::{self as pb};
use husk_virtio_net::NetSetup;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio_stream::{
    Stream, StreamExt,
    wrappers::{BroadcastStream, ReceiverStream},
};
use tonic::{Request, Response, Status};

use super::fields::missing;
use super::nics;
use super::ports::{EventStream, PortStates};
use super::vsock::{self, VsockCommand};

/// The sender of a command's answer.
pub type Reply<T> = oneshot::Sender<Result<T, Status>>;

/// Commands of the control actor.
#[derive(Debug)]
pub enum VmmCommand {
    /// Builds the machine.
    Create(Box<pb::VmConfig>, Reply<()>),
    /// Loads the kernel and starts the vCPUs, or stays paused.
    Boot { paused: bool, reply: Reply<()> },
    /// Stops vCPUs and device workers.
    Pause(Reply<()>),
    /// Resumes.
    Resume(Reply<()>),
    /// Presses the power button. With `reboot`, the guest's power-off resets the machine.
    Shutdown { reboot: bool, reply: Reply<()> },
    /// Resets the machine.
    Reset(Reply<()>),
    /// Ends the VM.
    Stop(Reply<()>),
    /// Describes the VM.
    Info(Reply<pb::InfoResponse>),
    /// Returns the present state and a receiver of the events after it.
    Subscribe(Reply<(pb::Event, broadcast::Receiver<pb::Event>)>),
    /// Sets the balloon's target in bytes.
    SetBalloon(u64, Reply<()>),
    /// Adds a SCSI disk.
    AddDisk(Box<pb::AddDiskRequest>, Reply<pb::AddDiskResponse>),
    /// Removes the SCSI disk with this id.
    RemoveDisk(String, Reply<pb::RemoveDiskResponse>),
    /// Plugs a NIC. Returns its PCI slot.
    AddNic(Box<NetSetup>, Reply<u32>),
    /// Asks the guest to eject the NIC with this id.
    RemoveNic(String, Reply<()>),
    /// Sets the link of the NIC with this id.
    SetLink { id: String, up: bool, reply: Reply<()> },
    /// Updates the size of the disk with this id from its file. Returns the size in bytes.
    ResizeDisk(String, Reply<u64>),
    /// Inserts a disc into the drive that it names. Returns its size in bytes.
    InsertDisc(Box<pb::Disk>, Reply<u64>),
    /// Ejects the disc of the drive with this id.
    EjectDisc(String, Reply<()>),
    /// Begins a connection of the vsock device.
    Vsock(VsockCommand, Reply<()>),
    /// Returns the guest's requests for such connections, once.
    VsockRequests(Reply<mpsc::Receiver<pb::VsockRequest>>),
}

/// Handle of the control actor.
#[derive(Clone, Debug)]
pub struct VmmHandle {
    pub(super) commands: mpsc::Sender<VmmCommand>,
    /// For descriptors that are claimed outside the actor.
    pub(super) fds: FdReceiver,
    pub(super) ports: watch::Receiver<PortStates>,
}

impl VmmHandle {
    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> VmmCommand) -> Result<Response<T>, Status> {
        let gone = || Status::unavailable("the VM has ended");
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?.map(Response::new)
    }
}

#[tonic::async_trait]
impl Vmm for VmmHandle {
    type EventsStream = Pin<Box<dyn Stream<Item = Result<pb::Event, Status>> + Send>>;
    type VsockRequestsStream = Pin<Box<dyn Stream<Item = Result<pb::VsockRequest, Status>> + Send>>;

    async fn create(
        &self,
        request: Request<pb::CreateRequest>,
    ) -> Result<Response<pb::CreateResponse>, Status> {
        let config = request
            .into_inner()
            .config
            .ok_or_else(|| Status::invalid_argument("config is missing"))?;
        self.ask(|reply| VmmCommand::Create(Box::new(config), reply))
            .await?;
        Ok(Response::new(pb::CreateResponse {}))
    }

    async fn boot(&self, request: Request<pb::BootRequest>) -> Result<Response<pb::BootResponse>, Status> {
        let paused = request.into_inner().paused;
        self.ask(|reply| VmmCommand::Boot { paused, reply }).await?;
        Ok(Response::new(pb::BootResponse {}))
    }

    async fn pause(&self, _: Request<pb::PauseRequest>) -> Result<Response<pb::PauseResponse>, Status> {
        self.ask(VmmCommand::Pause).await?;
        Ok(Response::new(pb::PauseResponse {}))
    }

    async fn resume(&self, _: Request<pb::ResumeRequest>) -> Result<Response<pb::ResumeResponse>, Status> {
        self.ask(VmmCommand::Resume).await?;
        Ok(Response::new(pb::ResumeResponse {}))
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
        self.ask(VmmCommand::Info).await
    }

    async fn events(&self, _: Request<pb::EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        let (present, rest) = self.ask(VmmCommand::Subscribe).await?.into_inner();
        // The stream of a monitor that falls behind ends: it never skips events.
        let rest = BroadcastStream::new(rest).map(|e| e.map_err(|e| Status::data_loss(e.to_string())));
        let stream = tokio_stream::once(Ok(present)).chain(EventStream::new(self.ports.clone(), rest));
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
        let request = Box::new(request.into_inner());
        self.ask(|reply| VmmCommand::AddDisk(request, reply)).await
    }

    async fn remove_disk(
        &self,
        request: Request<pb::RemoveDiskRequest>,
    ) -> Result<Response<pb::RemoveDiskResponse>, Status> {
        let id = request.into_inner().id;
        self.ask(|reply| VmmCommand::RemoveDisk(id, reply)).await
    }

    async fn resize_disk(
        &self,
        request: Request<pb::ResizeDiskRequest>,
    ) -> Result<Response<pb::ResizeDiskResponse>, Status> {
        let id = request.into_inner().id;
        let bytes = self
            .ask(|reply| VmmCommand::ResizeDisk(id, reply))
            .await?
            .into_inner();
        Ok(Response::new(pb::ResizeDiskResponse { bytes }))
    }

    async fn insert_disc(
        &self,
        request: Request<pb::InsertDiscRequest>,
    ) -> Result<Response<pb::InsertDiscResponse>, Status> {
        let disc = request.into_inner().disc.ok_or_else(|| missing("disc"))?;
        let bytes = self
            .ask(|reply| VmmCommand::InsertDisc(Box::new(disc), reply))
            .await?
            .into_inner();
        Ok(Response::new(pb::InsertDiscResponse { bytes }))
    }

    async fn eject_disc(
        &self,
        request: Request<pb::EjectDiscRequest>,
    ) -> Result<Response<pb::EjectDiscResponse>, Status> {
        let id = request.into_inner().id;
        self.ask(|reply| VmmCommand::EjectDisc(id, reply)).await?;
        Ok(Response::new(pb::EjectDiscResponse {}))
    }

    async fn add_nic(
        &self,
        request: Request<pb::AddNicRequest>,
    ) -> Result<Response<pb::AddNicResponse>, Status> {
        let nic = request.into_inner().nic.ok_or_else(|| missing("nic"))?;
        let setup = Box::new(nics::setup(&self.fds, "nic", &nic).await?);
        let slot = self.ask(|reply| VmmCommand::AddNic(setup, reply)).await?;
        let pci_slot = slot.into_inner();
        Ok(Response::new(pb::AddNicResponse { pci_slot }))
    }

    async fn remove_nic(
        &self,
        request: Request<pb::RemoveNicRequest>,
    ) -> Result<Response<pb::RemoveNicResponse>, Status> {
        let id = request.into_inner().id;
        self.ask(|reply| VmmCommand::RemoveNic(id, reply)).await?;
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
        let requests = self.ask(VmmCommand::VsockRequests).await?.into_inner();
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
