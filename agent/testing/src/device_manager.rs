//! The kubelet's device manager.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use api::device_plugin_client::DevicePluginClient;
use api::registration_server::{Registration, RegistrationServer};

/// Messages of the API.
#[allow(
    missing_debug_implementations,
    unused_qualifications,
    clippy::all,
    clippy::pedantic
)]
pub mod api {
    tonic::include_proto!("v1beta1");
}

/// The kubelet's side of the registration of device plugins.
#[derive(Debug, Default, Clone)]
pub struct DeviceManager {
    requests: Arc<Mutex<Vec<api::RegisterRequest>>>,
}

#[tonic::async_trait]
impl Registration for DeviceManager {
    async fn register(&self, request: Request<api::RegisterRequest>) -> Result<Response<api::Empty>, Status> {
        self.requests.lock().unwrap().push(request.into_inner());
        Ok(Response::new(api::Empty {}))
    }
}

impl DeviceManager {
    /// Starts in `directory` as a kubelet does: it removes the plugins' sockets.
    ///
    /// # Panics
    /// If it cannot listen there.
    pub fn start(&self, directory: &Path) -> JoinHandle<()> {
        for entry in std::fs::read_dir(directory).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let listener = UnixListener::bind(directory.join("kubelet.sock")).unwrap();
        let service = RegistrationServer::new(self.clone());
        let server = Server::builder().serve_with_incoming(service, UnixListenerStream::new(listener));
        tokio::spawn(async move { server.await.unwrap() })
    }

    /// The registrations since the first start, in order.
    #[must_use]
    pub fn registrations(&self) -> Vec<api::RegisterRequest> {
        self.requests.lock().unwrap().clone()
    }
}

/// Connects to the device plugin at `socket`.
///
/// # Panics
/// If nothing listens there.
pub async fn connect(socket: PathBuf) -> DevicePluginClient<Channel> {
    let connector = tower::service_fn(move |_| {
        let path = socket.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://plugin");
    DevicePluginClient::new(endpoint.connect_with_connector(connector).await.unwrap())
}
