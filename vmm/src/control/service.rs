//! husk.vmm.v1.Vmm: every call is a message to the actor.

use std::pin::Pin;

use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::vmm_server::Vmm;
use husk_proto::vmm::v1::{self as pb};
use husk_virtio_net::NetSetup;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio_stream::{Stream, StreamExt, wrappers::BroadcastStream};
use tonic::{Request, Response, Status};

use super::fields::missing;
use super::nics;

/// The answer to one command.
pub type Reply<T> = oneshot::Sender<Result<T, Status>>;

/// What the actor can be asked.
#[derive(Debug)]
pub enum VmmCommand {
    /// Build the machine.
    Create(Box<pb::VmConfig>, Reply<()>),
    /// Load and start, or stay paused.
    Boot { paused: bool, reply: Reply<()> },
    /// Stop vCPUs and workers.
    Pause(Reply<()>),
    /// Go on.
    Resume(Reply<()>),
    /// Power button.
    Shutdown(Reply<()>),
    /// Reset in place.
    Reset(Reply<()>),
    /// End.
    Stop(Reply<()>),
    /// Describe.
    Info(Reply<pb::InfoResponse>),
    /// The present state and all that follows.
    Subscribe(Reply<(pb::Event, broadcast::Receiver<pb::Event>)>),
    /// Balloon target: guest memory in bytes.
    SetBalloon(u64, Reply<()>),
    /// Add a SCSI disk.
    AddDisk(Box<pb::AddDiskRequest>, Reply<pb::AddDiskResponse>),
    /// Remove the SCSI disk of that id.
    RemoveDisk(String, Reply<pb::RemoveDiskResponse>),
    /// Plug a NIC in: its PCI slot.
    AddNic(Box<NetSetup>, Reply<u32>),
    /// Have the guest give the NIC of that id up.
    RemoveNic(String, Reply<()>),
    /// Pull the cable of the NIC of that id, or plug it in.
    SetLink { id: String, up: bool, reply: Reply<()> },
    /// Have the disk of that id follow its file: its size in bytes.
    ResizeDisk(String, Reply<u64>),
}

/// The actor's mailbox.
#[derive(Clone, Debug)]
pub struct VmmHandle {
    pub(super) commands: mpsc::Sender<VmmCommand>,
    /// Where descriptors are claimed from that are waited for beside the actor.
    pub(super) fds: FdReceiver,
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
        _: Request<pb::ShutdownRequest>,
    ) -> Result<Response<pb::ShutdownResponse>, Status> {
        self.ask(VmmCommand::Shutdown).await?;
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
        // A monitor that falls behind loses the stream, not events in its middle.
        let rest = BroadcastStream::new(rest).map(|e| e.map_err(|e| Status::data_loss(e.to_string())));
        let stream = tokio_stream::once(Ok(present)).chain(rest);
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
}
