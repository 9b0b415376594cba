//! The node's devices as extended resources: `devices.kubevirt.io/{kvm,tun,vhost-net}`, and `vhost-vsock` under
//! KubeVirt's feature gate VSOCK. A launcher pod asks for them, though Husk's shim opens the devices itself.
//!
//! ```text
//! kubelet ◀── Register on kubelet.sock ── DevicePlugin ── health of the device ──▶ watch
//!    └─ ListAndWatch, Allocate on kubevirt-NAME.sock ──▶ Service ◀───────────────────┘
//! ```
//!
//! The kubelet removes the sockets of all plugins when it starts. A plugin whose socket is gone binds it again and
//! registers again.

mod service;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};
use tracing::{error, info, warn};

use crate::api_client;
use crate::node::follow_gate;
use crate::watching::stopped;
use service::Service;

/// Messages of the API.
#[allow(unused_qualifications, clippy::all, clippy::pedantic)]
mod api {
    tonic::include_proto!("v1beta1");
}

/// Version of the API.
const VERSION: &str = "v1beta1";
/// Prefix of the resources' names.
const RESOURCES: &str = "devices.kubevirt.io";
/// File name of the kubelet's socket.
const KUBELET_SOCKET: &str = "kubelet.sock";
/// Delays before a further attempt to register, in milliseconds. The last one is repeated. A kubelet that starts removes
/// the plugins' sockets just before it listens.
const BACKOFF: [u64; 5] = [200, 1000, 2000, 5000, 10_000];
/// Maximum time of one attempt to register.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two checks of the device and the sockets. A kubelet that was restarted soon admits its running pods
/// again, and ends those whose devices are not registered.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Time to register again before the node counts as one without the device. A kubelet that was restarted also ends the
/// running pods whose node selector no longer matches, `kubevirt.io/schedulable` in it.
const REGISTER_AGAIN_TIME: Duration = Duration::from_secs(60);
/// Time for the kubelet to read the empty list of a plugin that ends.
const LAST_LIST_TIMEOUT: Duration = Duration::from_secs(1);

/// A device of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeDevice {
    /// Name of the resource, without the prefix.
    pub name: &'static str,
    /// Path of the device on the node and in the container.
    pub path: PathBuf,
    /// KubeVirt's feature gate, of state Alpha, without which no pod asks for the device.
    pub gate: Option<&'static str>,
}

/// The devices that KubeVirt's launcher pods ask for.
#[must_use]
pub fn node_devices() -> [NodeDevice; 4] {
    [
        ("kvm", "/dev/kvm", None),
        ("tun", "/dev/net/tun", None),
        ("vhost-net", "/dev/vhost-net", None),
        ("vhost-vsock", "/dev/vhost-vsock", Some("VSOCK")),
    ]
    .map(|(name, path, gate)| NodeDevice {
        name,
        path: path.into(),
        gate,
    })
}

/// A device plugin.
#[derive(Debug)]
pub struct DevicePlugin {
    device: NodeDevice,
    /// Number of pods that can have the device at the same time.
    count: u32,
    /// The kubelet's directory of plugins.
    directory: PathBuf,
    registered: watch::Sender<bool>,
}

/// The end of a plugin's service.
enum Ended {
    /// Its socket or the kubelet's was replaced.
    KubeletRestarted,
    Stopped,
}

impl DevicePlugin {
    /// A plugin, and a watch that is true while the kubelet knows it, and for a minute after it was restarted; also
    /// while the feature gate of its device is off.
    #[must_use]
    pub fn new(device: NodeDevice, count: u32, directory: PathBuf) -> (DevicePlugin, watch::Receiver<bool>) {
        let (registered, watch) = watch::channel(false);
        let plugin = DevicePlugin {
            device,
            count,
            directory,
            registered,
        };
        (plugin, watch)
    }

    fn socket_name(&self) -> String {
        format!("kubevirt-{}.sock", self.device.name)
    }

    /// Serves until `stop` is true; a device with a feature gate only while that is on. Returns before if there is no
    /// configuration for the API server, which has the gate.
    pub async fn run(self, stop: watch::Receiver<bool>) {
        let Some(gate) = self.device.gate else {
            return self.publish(stop).await;
        };
        let client = match api_client::connect().await {
            Ok(client) => client,
            Err(error) => {
                return error!(device = self.device.name, %error, "the feature gate {gate} is not known");
            }
        };
        let (is_on, gate_is_on) = watch::channel(false);
        tokio::join!(
            follow_gate(client, gate, is_on, stop.clone()),
            self.publish_while(gate_is_on, stop)
        );
    }

    /// Serves while `is_on` is true, until `stop` is true.
    async fn publish_while(&self, mut is_on: watch::Receiver<bool>, mut stop: watch::Receiver<bool>) {
        loop {
            // A device for which no pod asks keeps no VMI from the node.
            self.registered.send_replace(true);
            if !becomes(&mut is_on, true, &mut stop).await {
                return;
            }
            let (off, is_off) = watch::channel(false);
            let turned_off = async {
                becomes(&mut is_on, false, &mut stop).await;
                off.send_replace(true);
            };
            tokio::join!(self.publish(is_off), turned_off);
        }
    }

    /// Serves until `stop` is true. Errors are logged, and another attempt is made.
    async fn publish(&self, mut stop: watch::Receiver<bool>) {
        let mut failures = 0;
        let mut lost = None;
        loop {
            match self.serve(&mut stop).await {
                Ok(Ended::Stopped) => return,
                Ok(Ended::KubeletRestarted) => {
                    info!(device = self.device.name, "the kubelet was restarted");
                    failures = 0;
                    lost = Some(Instant::now());
                }
                Err(error) => {
                    warn!(device = self.device.name, %error, "the device plugin is not registered");
                    let delay = BACKOFF[failures.min(BACKOFF.len() - 1)];
                    failures += 1;
                    tokio::select! {
                        () = sleep(Duration::from_millis(delay)) => {}
                        _ = stop.wait_for(|stop| *stop) => return,
                    }
                }
            }
            if lost.is_none_or(|lost| lost.elapsed() >= REGISTER_AGAIN_TIME) {
                self.registered.send_replace(false);
            }
        }
    }

    /// Binds the socket, registers, and serves until the kubelet was restarted.
    async fn serve(&self, stop: &mut watch::Receiver<bool>) -> io::Result<Ended> {
        let socket = self.directory.join(self.socket_name());
        match std::fs::remove_file(&socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket)?);
        let own = inode(&socket)?;
        let kubelet = self.directory.join(KUBELET_SOCKET);
        let kubelet_before = inode(&kubelet).ok();
        let mut present = self.device.path.exists();
        let (devices, watched) = watch::channel(self.list(present));
        let service = Service::new(self.device.clone(), watched);
        let (finish, finished) = oneshot::channel::<()>();
        let service = api::device_plugin_server::DevicePluginServer::new(service);
        let server = Server::builder().serve_with_incoming_shutdown(service, incoming, async {
            let _ = finished.await;
        });
        let server = tokio::spawn(server);
        let registered = self.register(&kubelet).await;
        let ended = match registered {
            Err(error) => Err(error),
            Ok(()) => {
                info!(device = self.device.name, "the device plugin is registered");
                self.registered.send_replace(true);
                loop {
                    tokio::select! {
                        () = sleep(CHECK_INTERVAL) => {}
                        _ = stop.wait_for(|stop| *stop) => break Ok(Ended::Stopped),
                    }
                    let replaced = inode(&socket).ok() != Some(own);
                    if replaced || inode(&kubelet).ok() != kubelet_before {
                        break Ok(Ended::KubeletRestarted);
                    }
                    let is_present = self.device.path.exists();
                    if is_present != present {
                        present = is_present;
                        devices.send_replace(self.list(present));
                    }
                }
            }
        };
        // The kubelet then counts no devices of a plugin that is gone.
        devices.send_replace(Vec::new());
        if matches!(ended, Ok(Ended::Stopped)) {
            sleep(LAST_LIST_TIMEOUT).await;
            let _ = std::fs::remove_file(&socket);
        }
        drop((devices, finish));
        server.abort();
        ended
    }

    async fn register(&self, kubelet: &Path) -> io::Result<()> {
        let request = api::RegisterRequest {
            version: VERSION.to_owned(),
            endpoint: self.socket_name(),
            resource_name: format!("{RESOURCES}/{}", self.device.name),
            options: Some(api::DevicePluginOptions::default()),
        };
        let kubelet = kubelet.to_owned();
        let register = async move {
            let connector = tower::service_fn(move |_| {
                let path = kubelet.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            });
            let endpoint = Endpoint::from_static("http://kubelet");
            let channel = endpoint
                .connect_with_connector(connector)
                .await
                .map_err(io::Error::other)?;
            let mut client = api::registration_client::RegistrationClient::new(channel);
            client.register(request).await.map_err(io::Error::other)?;
            Ok(())
        };
        timeout(REGISTER_TIMEOUT, register)
            .await
            .map_err(|_| io::Error::other("the kubelet does not answer"))?
    }

    /// The devices for the kubelet, healthy if the device is `present`.
    fn list(&self, present: bool) -> Vec<api::Device> {
        let health = match present {
            true => "Healthy",
            false => "Unhealthy",
        };
        (0..self.count)
            .map(|number| api::Device {
                id: format!("{}{number}", self.device.name),
                health: health.to_owned(),
            })
            .collect()
    }
}

/// Waits until `value` is `wanted`. Returns false if `stop` is true first, or if nobody sends values any more.
async fn becomes(value: &mut watch::Receiver<bool>, wanted: bool, stop: &mut watch::Receiver<bool>) -> bool {
    tokio::select! {
        biased;
        () = stopped(stop) => false,
        became = value.wait_for(|value| *value == wanted) => became.is_ok(),
    }
}

fn inode(path: &Path) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::symlink_metadata(path)?.ino())
}

#[cfg(test)]
mod tests;
