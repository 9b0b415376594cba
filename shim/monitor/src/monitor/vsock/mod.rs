//! The host's side of the guest's vsock device. A program connects to `vsock.sock` in the VM's directory and names a
//! port of the guest; the guest's connection to port P of the host goes to `vsock.sock_P` there. The VMM gets the
//! connected sockets, so that no byte of a connection passes the monitor.

mod handshake;
pub(super) mod vhost;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use husk_proto::fds::FdSender;
use husk_proto::vmm::v1::vmm_client::VmmClient;
use husk_proto::vmm::v1::{AnswerVsockRequest, ConnectVsockRequest, Fd, VsockRequest, VsockRequestsRequest};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Channel;
use tracing::{debug, warn};

use super::handle::VMM_TIMEOUT;
use super::listener;
use super::sync::short;
use super::vm::RunningVmm;
use super::vm_error::VmError;
use super::vmm_connection::call_within;
use crate::log_rate_limiter::LogRateLimiter;
use handshake::{HandshakeError, LINE_TIMEOUT, requested_port};

/// CID of the guest. The device is the VM's own, so that every VM may have the same.
pub(super) const GUEST_CID: u32 = 3;

/// Programs that may be about to connect to the guest. More wait until the kernel lets them in.
const HANDSHAKES: usize = 32;
/// Log lines about the guest's connections in each 5 s.
const LINES: u32 = 20;

/// Serves a VM's vsock connections until the VM has ended.
pub(super) struct VsockActor<S> {
    incoming: S,
    /// The VM's directory.
    dir: OwnedFd,
    vmm: watch::Receiver<Option<RunningVmm>>,
}

/// Reason why a connection has not begun.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error(transparent)]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Descriptor(#[from] husk_proto::fds::SendError),
    #[error(transparent)]
    Vmm(#[from] VmError),
}

/// Listens on `vsock.sock` in `dir`. Must be called on a tokio runtime.
pub(super) fn vsock_actor(
    dir: &Path,
    vmm: watch::Receiver<Option<RunningVmm>>,
) -> io::Result<VsockActor<impl Stream<Item = io::Result<UnixStream>> + use<>>> {
    Ok(VsockActor {
        incoming: listener::serve_streams(dir, "vsock.sock")?,
        dir: listener::open_dir(dir)?,
        vmm,
    })
}

/// The VMM's calls, and the socket that passes descriptors to it.
#[derive(Clone)]
struct Vmm {
    client: VmmClient<Channel>,
    fds: Arc<FdSender>,
}

impl<S: Stream<Item = io::Result<UnixStream>> + Unpin> VsockActor<S> {
    /// Serves. Programs that connect before the VM runs wait.
    pub(super) async fn run(mut self) {
        let vmm = match self.vmm.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(running)) => Vmm {
                client: running.client.clone(),
                fds: running.fds.clone(),
            },
            // The VM has not started.
            _ => return,
        };
        tokio::select! {
            () = from_guest(vmm.clone(), &self.dir) => {}
            () = to_guest(vmm, self.incoming) => {}
            _ = self.vmm.wait_for(Option::is_none) => {}
        }
    }
}

/// Serves programs that connect to the guest, for as long as the socket exists.
async fn to_guest(vmm: Vmm, mut incoming: impl Stream<Item = io::Result<UnixStream>> + Unpin) {
    let mut handshakes = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = handshakes.join_next() => {}
            Some(connection) = incoming.next(), if handshakes.len() < HANDSHAKES => match connection {
                Ok(stream) => {
                    let vmm = vmm.clone();
                    handshakes.spawn(async move {
                        if let Err(error) = connect(vmm, stream).await {
                            debug!(%error, "a program was not connected to the guest");
                        }
                    });
                }
                // Such as too many open files. The end of a handshake closes one.
                Err(error) => {
                    warn!(%error, "vsock.sock");
                    tokio::time::sleep(LINE_TIMEOUT).await;
                }
            },
            else => return,
        }
    }
}

/// The port that a program asks for, if it asks for one.
#[cfg(feature = "testing")]
pub(super) async fn port_asked_for(program: &mut (impl tokio::io::AsyncRead + Unpin)) -> Option<u32> {
    requested_port(program).await.ok()
}

/// Passes a program's socket to the VMM, which tells the program whether the guest has accepted.
async fn connect(mut vmm: Vmm, mut stream: UnixStream) -> Result<(), ConnectError> {
    let port = requested_port(&mut stream).await?;
    let stream = Some(vmm.send(&stream).await?);
    let request = ConnectVsockRequest { port, stream };
    call_within(VMM_TIMEOUT, vmm.client.connect_vsock(request)).await?;
    Ok(())
}

/// Answers the guest's requests, one after the other: a guest that asks for many has one under way. Returns when the
/// VMM has ended.
async fn from_guest(mut vmm: Vmm, dir: &OwnedFd) {
    let mut log = LogRateLimiter::new("the log of the guest's vsock connections", LINES);
    let mut requests = match vmm.client.vsock_requests(VsockRequestsRequest {}).await {
        Ok(requests) => requests.into_inner(),
        Err(error) => {
            warn!(
                error = short(error.message()),
                "the guest cannot connect to the host by vsock"
            );
            return std::future::pending().await;
        }
    };
    while let Ok(Some(VsockRequest { id, port })) = requests.message().await {
        if let Err(error) = answer(&mut vmm, dir, id, port).await
            && log.allow()
        {
            let error = short(&error.to_string());
            warn!(error, port, "a vsock connection of the guest was not answered");
        }
    }
}

/// Connects to the program of the host that listens on `port`. Without one the guest is refused.
async fn answer(vmm: &mut Vmm, dir: &OwnedFd, id: u64, port: u32) -> Result<(), ConnectError> {
    // As in [`listener`]: short for any VM name.
    let path = format!("/proc/self/fd/{}/vsock.sock_{port}", dir.as_raw_fd());
    let stream = match UnixStream::connect(path).await {
        Ok(stream) => Some(vmm.send(&stream).await?),
        Err(error) => {
            debug!(%error, port, "nobody accepts the guest's connection");
            None
        }
    };
    let request = AnswerVsockRequest { id, stream };
    call_within(VMM_TIMEOUT, vmm.client.answer_vsock(request)).await?;
    Ok(())
}

impl Vmm {
    async fn send(&self, stream: &impl AsFd) -> Result<Fd, husk_proto::fds::SendError> {
        Ok(self.fds.send_one(stream.as_fd()).await?.into())
    }
}
