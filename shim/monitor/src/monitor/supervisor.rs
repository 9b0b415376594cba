//! A VM with its actors and its gRPC server.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use husk_proto::services::either;
use husk_proto::shim::v1::guest_server::GuestServer;
use husk_proto::shim::v1::pod_server::PodServer;
use husk_vmi::{CredentialsPlan, DiskPlan, DiskSource, VmPlan};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::transport::Server;
use tracing::{error, info, warn};

use super::disks::DisksActor;
use super::downward_metrics::{self, METRICS_PORT, MetricsDisk, MetricsSource};
use super::final_status::FinalStatus;
use super::guest_agent::{AgentActor, AgentHandle, GuestService};
use super::guest_channel::{AGENT_PORT, GuestChannel, GuestPort, guest_channel};
use super::handle::VmHandle;
use super::interfaces::{self, InterfacesActor};
use super::io_error_retry::retry_after_io_errors;
use super::service::{Service, ServiceParts};
use super::snapshots::{SnapshotSources, SnapshotsActor};
use super::status::StatusPublisher;
use super::vm::{GuestFds, VmActor};
use super::vsock::vsock_actor;
use super::{guest_agent, heap, listener, stdio};
use crate::console::Console;
use crate::launch::{RestoreOptions, StartMode};
use crate::state::{ClaimedDir, VmDir};
use crate::vm_environment::VmEnvironment;

/// Maximum time for clients to read the final status.
const FINAL_STATUS_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time that the end of the VM waits for the removal of an unfinished snapshot.
const REMOVED_WITHIN: Duration = Duration::from_secs(5);
/// Maximum size of a message, in bytes: a manifest with its envelope.
pub(super) const MESSAGE_BYTES: usize = husk_vmi::MANIFEST_LIMIT + (128 << 10);

/// A VM that has not started yet. Its pod.sock is served already.
pub(super) struct Supervisor {
    vm: VmActor,
    disks: DisksActor,
    snapshots: SnapshotsActor,
    /// Closed once no snapshot is being made or removed.
    removals: mpsc::Receiver<Infallible>,
    /// The snapshot that the VM goes on from.
    restore: Option<RestoreOptions>,
    interfaces: interfaces::InterfacesHandle,
    /// The guest's end of its console.
    guest: Option<OwnedFd>,
    /// The guest's ends of its ports.
    ports: Vec<GuestPort>,
    agent: AgentActor,
    credentials: CredentialsPlan,
    /// Serves vsock connections until the VM ends. None: the host's kernel does.
    vsock: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// The port of downward metrics, if the manifest asks for it.
    metrics: Option<(GuestChannel, MetricsSource)>,
    /// The disk of downward metrics, and the VMM's end of it.
    metrics_disk: Option<(MetricsDisk, MetricsSource, OwnedFd)>,
    status_server: StatusServer,
    pub(super) handle: VmHandle,
    pub(super) agent_handle: AgentHandle,
    pub(super) console: Option<Console>,
}

/// The gRPC server, and the publisher of the status that it serves.
pub(super) struct StatusServer {
    publisher: StatusPublisher,
    finish: oneshot::Sender<()>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Supervisor {
    /// Writes the VM's plan and metadata to its directory and starts to serve. The VM goes on from a snapshot, if given.
    /// Must be called on a tokio runtime.
    pub(super) fn new(
        plan: VmPlan,
        vmi: &serde_json::Value,
        dir: &VmDir,
        environment: VmEnvironment,
        restore: Option<RestoreOptions>,
    ) -> io::Result<Supervisor> {
        stdio::write_json(&dir.plan(), &plan)?;
        stdio::write_json(&dir.vmi(), vmi)?;
        let (guest, console) = UnixStream::pair()?;
        let console = plan
            .serial_console
            .then(|| Console::start(console, dir.console_log()));
        let guest = plan.serial_console.then(|| guest.into_std()).transpose()?;
        let (channel, agent_port) = guest_channel(AGENT_PORT)?;
        let mut ports = vec![agent_port];
        let incoming = listener::serve_streams(dir.path(), "pod.sock")?;
        let descriptors = listener::serve_descriptors(dir.path())?;

        let (plan, credentials) = (Arc::new(plan.clone()), plan.credentials);
        let publisher = StatusPublisher::new();
        let (running, vmm) = watch::channel(None);
        let environment = Arc::new(environment);
        let (disks, plugging) = DisksActor::new(VmPlan::clone(&plan), dir.plan(), environment.clone());
        let (network, interfaces) =
            InterfacesActor::new(plan.clone(), environment.network.clone(), dir.path().to_owned());
        tokio::spawn(network.run());
        let (removing, removals) = mpsc::channel(1);
        let (snapshots, saving) = SnapshotsActor::new(SnapshotSources {
            vmm: vmm.clone(),
            disks: plugging.clone(),
            interfaces: interfaces.clone(),
            vmi: Arc::new(vmi.clone()),
            removing,
        });
        let (vm, handle) = VmActor::new(
            plan.clone(),
            environment.clone(),
            publisher.clone(),
            running,
            plugging.clone(),
            interfaces.clone(),
            saving.clone(),
        );
        let (agent, agent_handle) = AgentActor::new(
            channel,
            publisher.subscribe(),
            guest_agent::needs(&plan.credentials),
            restore.is_some(),
        );
        let mut vsock: Option<Pin<Box<dyn Future<Output = ()> + Send>>> = None;
        if plan.vhost_vsock_cid.is_none() {
            vsock = Some(Box::pin(vsock_actor(dir.path(), vmm.clone())?.run()));
        }
        let metrics = if plan.downward_metrics {
            let (channel, port) = guest_channel(METRICS_PORT)?;
            ports.push(port);
            Some((channel, MetricsSource::new(&plan, vmi, vmm.clone())))
        } else {
            None
        };
        let on_disk = |disk: &DiskPlan| disk.source == DiskSource::DownwardMetrics;
        let metrics_disk = if plan.disks.iter().any(on_disk) {
            let (disk, file) = MetricsDisk::create()?;
            Some((disk, MetricsSource::new(&plan, vmi, vmm.clone()), file))
        } else {
            None
        };
        tokio::spawn(retry_after_io_errors(publisher.subscribe(), vmm.clone()));
        let handle = VmHandle::new(handle, vmm, publisher.subscribe(), saving);
        // What a VMI is compared with. The disks that were plugged before the snapshot are not of the start.
        let plan = match &restore {
            Some(restore) => Arc::new(plan.without_plugged(&restore.plugged_disks)),
            None => plan,
        };
        let service = Service::new(ServiceParts {
            plan,
            environment,
            vm: handle.clone(),
            disks: plugging,
            interfaces: interfaces.clone(),
            descriptors,
            console: console.clone(),
            agent: agent_handle.clone(),
        });
        let service = PodServer::new(service).max_decoding_message_size(MESSAGE_BYTES);
        let guest_service = GuestServer::new(GuestService::new(agent_handle.clone()));
        let (finish, finished) = oneshot::channel::<()>();
        let services = either(service, guest_service);
        let server = Server::builder().serve_with_incoming_shutdown(services, incoming, async {
            let _ = finished.await;
        });
        Ok(Supervisor {
            vm,
            disks,
            snapshots,
            removals,
            restore,
            interfaces,
            guest: guest.map(Into::into),
            ports,
            agent,
            credentials,
            vsock,
            metrics,
            metrics_disk,
            status_server: StatusServer {
                publisher,
                finish,
                server: tokio::spawn(server),
            },
            handle,
            agent_handle,
            console,
        })
    }

    /// Runs the VM until it has ended.
    pub(super) async fn run(mut self, start_mode: StartMode) -> (FinalStatus, StatusServer) {
        tokio::spawn(heap::trim_after_start(self.handle.status()));
        // The console's actor and the status watch end with their last handles.
        drop((self.console, self.handle));
        tokio::spawn(guest_agent::propagate(self.credentials, self.agent_handle));
        tokio::spawn(self.agent.run());
        self.vsock.map(tokio::spawn);
        if let Some((channel, source)) = self.metrics {
            tokio::spawn(downward_metrics::serve(channel, source));
        }
        let metrics_disk = self.metrics_disk.map(|(disk, source, file)| {
            tokio::spawn(disk.keep(source));
            file
        });
        let guest = GuestFds {
            console: self.guest,
            ports: self.ports,
            metrics_disk,
        };
        let final_status = tokio::select! {
            final_status = self.vm.run(guest, self.restore, start_mode) => final_status,
            // These actors are stopped with the VM.
            never = self.disks.run() => match never {},
            never = self.snapshots.run() => match never {},
        };
        info!(
            phase = final_status.phase.as_str_name(),
            reason = final_status.reason,
            message = final_status.message,
            "the VM ended"
        );
        if timeout(REMOVED_WITHIN, self.removals.recv()).await.is_err() {
            warn!(
                "the storage of a snapshot does not answer: the unfinished snapshot was perhaps not removed"
            );
        }
        self.interfaces.close().await;
        (final_status, self.status_server)
    }
}

impl StatusServer {
    /// Publishes the final status and waits for clients to read it.
    pub(super) async fn publish_final(self, final_status: FinalStatus) {
        self.publisher.end(final_status);
        drop((self.publisher, self.finish));
        if timeout(FINAL_STATUS_TIMEOUT, self.server).await.is_err() {
            warn!("a client did not read the final status");
        }
    }
}

/// Removes the VM's directory, or leaves it for the next command to remove.
pub(super) fn remove_dir(claimed: ClaimedDir) {
    let path = claimed.dir().path().to_owned();
    if let Err(error) = claimed.remove() {
        // The lock ends with this process, so the next command tries again.
        error!(dir = %path.display(), %error, "the state directory was not removed");
    }
}
