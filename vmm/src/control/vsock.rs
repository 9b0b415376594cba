//! Connections of the vsock device: converts a request's fields, and tells the monitor what the guest asks for.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1 as pb;
use husk_virtio_vsock::{MAX_CONNECTIONS, RequestFn, VsockError, VsockHandle};
use tokio::sync::mpsc;
use tonic::Status;

use super::fields::{invalid, take_fd};
use crate::machine::VsockSetup;

/// The device of a configuration. Takes its descriptor.
pub(super) async fn setup(
    fds: &FdReceiver,
    guest_cid: u32,
    vhost: Option<&pb::Fd>,
) -> Result<Option<VsockSetup>, Status> {
    let vhost = match vhost {
        Some(_) => Some(take_fd(fds, "config.vhost_vsock", vhost).await?),
        None => None,
    };
    match (cid(guest_cid)?, vhost) {
        (Some(cid), vhost) => Ok(Some(VsockSetup { cid, vhost })),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(invalid("config.vhost_vsock", "needs config.vsock_cid")),
    }
}

/// The CID in a configuration.
fn cid(cid: u32) -> Result<Option<u32>, Status> {
    match cid {
        0 => Ok(None),
        // Of the hypervisor, of loopback and of the host; any CID.
        1 | 2 | u32::MAX => Err(invalid(
            "config.vsock_cid",
            "must be at least 3, and not the highest number",
        )),
        cid => Ok(Some(cid)),
    }
}

/// A command for the vsock device.
#[derive(Debug)]
pub enum VsockCommand {
    /// Connects a socket to this port of the guest.
    Connect(u32, OwnedFd),
    /// Answers this request of the guest.
    Answer(u64, Option<OwnedFd>),
}

/// Takes the socket of a connection to the guest.
pub(super) async fn connect(
    fds: &FdReceiver,
    request: pb::ConnectVsockRequest,
) -> Result<VsockCommand, Status> {
    let stream = take_fd(fds, "stream", request.stream.as_ref()).await?;
    Ok(VsockCommand::Connect(request.port, stream))
}

/// Takes the socket of an answer to the guest.
pub(super) async fn answer(
    fds: &FdReceiver,
    request: pb::AnswerVsockRequest,
) -> Result<VsockCommand, Status> {
    let stream = match request.stream {
        Some(stream) => Some(take_fd(fds, "stream", Some(&stream)).await?),
        None => None,
    };
    Ok(VsockCommand::Answer(request.id, stream))
}

/// Carries out a command.
pub(super) fn execute(vsock: Option<&VsockHandle>, command: VsockCommand) -> Result<(), Status> {
    let vsock =
        vsock.ok_or_else(|| Status::failed_precondition("the VMM carries no vsock connections of the VM"))?;
    let done = match command {
        VsockCommand::Connect(port, stream) => vsock.connect(port, stream),
        VsockCommand::Answer(id, stream) => match vsock.answer(id, stream) {
            // The request has ended with its driver.
            Err(VsockError::NoDriver) => Ok(()),
            answered => answered,
        },
    };
    done.map_err(|error| match error {
        VsockError::NoDriver => Status::failed_precondition(error.to_string()),
        VsockError::Busy => Status::resource_exhausted(error.to_string()),
        VsockError::Socket(_) => Status::internal(error.to_string()),
    })
}

/// The queue of the guest's requests that the monitor has not read.
pub(super) fn requests() -> (mpsc::Sender<pb::VsockRequest>, mpsc::Receiver<pb::VsockRequest>) {
    mpsc::channel(MAX_CONNECTIONS)
}

/// Puts requests into the queue. One that finds no place is refused.
pub(super) fn request_fn(sender: mpsc::Sender<pb::VsockRequest>) -> RequestFn {
    Arc::new(move |id, port| sender.try_send(pb::VsockRequest { id, port }).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_cids_are_refused() {
        assert_eq!(cid(0).unwrap(), None);
        assert_eq!(cid(3).unwrap(), Some(3));
        for reserved in [1, 2, u32::MAX] {
            let text = cid(reserved).unwrap_err().message().to_owned();
            assert!(text.starts_with("config.vsock_cid: must be at least 3"), "{text}");
        }
    }

    #[tokio::test]
    async fn requests_that_nobody_reads_are_limited() {
        let (sender, mut receiver) = requests();
        let request = request_fn(sender);
        let taken = (0..5000).filter(|id| request(*id, 7)).count();
        assert_eq!(taken, MAX_CONNECTIONS);
        assert_eq!(receiver.recv().await, Some(pb::VsockRequest { id: 0, port: 7 }));
        assert!(request(5000, 7) && !request(5001, 7));
        drop(receiver);
        assert!(!request(5002, 7));
    }

    #[test]
    fn a_machine_without_the_device_says_so() {
        let error = execute(None, VsockCommand::Answer(1, None)).unwrap_err();
        assert_eq!(error.code(), tonic::Code::FailedPrecondition);
    }
}
