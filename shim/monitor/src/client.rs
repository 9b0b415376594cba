//! The connection to a VM's monitor.

use std::os::fd::AsRawFd;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustix::fs::{Mode, OFlags};
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

/// Connects to the monitor of a VM that [`crate::state::RuntimeDir`] listed or found.
pub async fn connect(vm: &VmDir) -> Result<PodClient, ConnectError> {
    Ok(Service::new(channel(vm).await?))
}

/// Connects to the agent in the guest of a running VM.
pub async fn connect_guest(vm: &VmDir) -> Result<GuestClient, ConnectError> {
    Ok(guest_client::GuestClient::new(channel(vm).await?))
}

async fn channel(vm: &VmDir) -> Result<Channel, ConnectError> {
    // A Unix socket address holds 108 bytes. The path of a VM may be longer, but is short through the open directory.
    let open = rustix::fs::open(
        vm.path(),
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let dir = open.map_err(|_| StateError::NotFound {
        namespace: vm.namespace().into(),
        name: vm.name().into(),
    })?;
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
