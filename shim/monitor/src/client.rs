//! The connection to a VM's monitor, and to its guest.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use husk_vmi::VmPlan;
use hyper_util::rt::TokioIo;
use rustix::fs::{Mode, OFlags};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use crate::state::{StateError, VmDir};

use husk_proto::shim::v1::guest_client;
pub use husk_proto::shim::v1::pod_client::PodClient as Service;

/// A client of one VM's monitor.
pub type PodClient = Service<Channel>;

/// A client of the agent in one VM's guest.
pub type GuestClient = guest_client::GuestClient<Channel>;

/// An error of connecting to a monitor.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The directory is gone: the VM has ended.
    #[error(transparent)]
    State(#[from] StateError),
    /// The socket does not answer.
    #[error("the monitor of {namespace}/{name} does not answer")]
    Transport {
        /// The VM's namespace.
        namespace: String,
        /// The VM's name.
        name: String,
        /// The cause.
        source: tonic::transport::Error,
    },
}

/// Most bytes of an answer on vsock.sock.
const ANSWER_BYTES: usize = 32;

/// An error of connecting to a port of the guest.
#[derive(Debug, thiserror::Error)]
pub enum VsockConnectError {
    /// The directory is gone: the VM has ended.
    #[error(transparent)]
    State(#[from] StateError),
    /// The host's kernel carries the guest's connections.
    #[error(
        "the guest has CID {cid} of this host (autoattachVSOCK): use a program of AF_VSOCK, such as \
         `socat - VSOCK-CONNECT:{cid}:{port}`, or KubeVirt's subresource vsock"
    )]
    HostVsock {
        /// The guest's CID.
        cid: u32,
        /// The port of the guest.
        port: u32,
    },
    /// The VM's vsock.sock does not let this program in.
    #[error("vsock.sock of {namespace}/{name}")]
    Socket {
        /// The VM's namespace.
        namespace: String,
        /// The VM's name.
        name: String,
        /// The cause.
        source: io::Error,
    },
    /// The connection was closed without an answer.
    #[error(
        "the guest refuses vsock port {0}: no program of it listens there, or its vsock driver is not loaded"
    )]
    Refused(u32),
}

/// Connects to a port of the guest by vsock.
pub async fn connect_vsock(vm: &VmDir, port: u32) -> Result<UnixStream, VsockConnectError> {
    if let Some(cid) = vhost_vsock_cid(vm) {
        return Err(VsockConnectError::HostVsock { cid, port });
    }
    let failed = |source| VsockConnectError::Socket {
        namespace: vm.namespace().into(),
        name: vm.name().into(),
        source,
    };
    let dir = open_dir(vm)?;
    let path = format!("/proc/self/fd/{}/vsock.sock", dir.as_raw_fd());
    let mut stream = UnixStream::connect(path).await.map_err(failed)?;
    let refused = |_| VsockConnectError::Refused(port);
    stream
        .write_all(format!("CONNECT {port}\n").as_bytes())
        .await
        .map_err(refused)?;
    // The answer is "OK PORT". What follows it is the guest's.
    for _ in 0..ANSWER_BYTES {
        if stream.read_u8().await.map_err(refused)? == b'\n' {
            return Ok(stream);
        }
    }
    Err(VsockConnectError::Refused(port))
}

/// The guest's CID on the host's AF_VSOCK, by the VM's plan.
fn vhost_vsock_cid(vm: &VmDir) -> Option<u32> {
    let plan = std::fs::read(vm.plan()).ok()?;
    let plan: VmPlan = serde_json::from_slice(&plan).ok()?;
    plan.vhost_vsock_cid
}

/// Connects to the monitor of a VM that [`crate::state::RuntimeDir`] listed or found.
pub async fn connect(vm: &VmDir) -> Result<PodClient, ConnectError> {
    Ok(Service::new(channel(vm).await?))
}

/// Connects to the agent in the guest of a running VM.
pub async fn connect_guest(vm: &VmDir) -> Result<GuestClient, ConnectError> {
    Ok(guest_client::GuestClient::new(channel(vm).await?))
}

/// Opens the directory of a VM. A Unix socket address holds 108 bytes. The path of a VM may be longer, but is short
/// through the open directory.
fn open_dir(vm: &VmDir) -> Result<OwnedFd, StateError> {
    let open = rustix::fs::open(
        vm.path(),
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    open.map_err(|_| StateError::NotFound {
        namespace: vm.namespace().into(),
        name: vm.name().into(),
    })
}

async fn channel(vm: &VmDir) -> Result<Channel, ConnectError> {
    let dir = open_dir(vm)?;
    let endpoint = Endpoint::from_static("http://pod").connect_timeout(Duration::from_secs(5));
    let connector = tower::service_fn(move |_| {
        let path = format!("/proc/self/fd/{}/pod.sock", dir.as_raw_fd());
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    endpoint
        .connect_with_connector(connector)
        .await
        .map_err(|source| ConnectError::Transport {
            namespace: vm.namespace().into(),
            name: vm.name().into(),
            source,
        })
}
