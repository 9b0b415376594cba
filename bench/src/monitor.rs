//! The connection to a VM's monitor.

use anyhow::{Context, Result};
use husk_proto::shim::v1::pod_client::PodClient;
use hyper_util::rt::TokioIo;
use std::path::Path;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// Connects to the monitor that serves `socket`.
pub async fn connect(socket: &Path) -> Result<PodClient<Channel>> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://pod");
    let channel = endpoint
        .connect_with_connector(connector)
        .await
        .with_context(|| format!("cannot reach {}", socket.display()))?;
    Ok(PodClient::new(channel))
}
