//! A VM with all that serves it, whichever process that is in.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use husk_proto::shim::v1::pod_server::PodServer;
use husk_vmi::VmPlan;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::transport::Server;
use tracing::{info, warn};

use super::disks::Disks;
use super::ending::Ending;
use super::handle::VmHandle;
use super::interfaces::{self, Interfaces};
use super::service::{Parts, Service};
use super::status::Board;
use super::vm::Vm;
use super::{listener, stdio};
use crate::console::Console;
use crate::launch::Starter;
use crate::state::VmDir;
use crate::surroundings::Surroundings;

/// How long clients have to take the final status.
const FAREWELL: Duration = Duration::from_secs(2);
/// A message to the monitor is a manifest at most, and what stands around it.
const MESSAGE_BYTES: usize = husk_vmi::MANIFEST_LIMIT + (128 << 10);

/// A VM that has not started, served on pod.sock already.
pub(super) struct Attended {
    vm: Vm,
    disks: Disks,
    interfaces: interfaces::Handle,
    /// The guest's end of its console.
    guest: Option<OwnedFd>,
    audience: Audience,
    pub(super) handle: VmHandle,
    pub(super) console: Option<Console>,
}

/// Those who want to know how the VM does.
pub(super) struct Audience {
    board: Board,
    finish: oneshot::Sender<()>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Attended {
    /// Writes down what the VM is and begins to serve, in the VM's directory. On a tokio runtime.
    pub(super) fn new(
        plan: VmPlan,
        vmi: &serde_json::Value,
        dir: &VmDir,
        surroundings: Surroundings,
    ) -> io::Result<Attended> {
        stdio::write_json(&dir.plan(), &plan)?;
        stdio::write_json(&dir.vmi(), vmi)?;
        let (guest, console) = UnixStream::pair()?;
        let console = plan
            .serial_console
            .then(|| Console::start(console, dir.console_log()));
        let guest = plan.serial_console.then(|| guest.into_std()).transpose()?;
        let incoming = listener::serve_calls(dir.path())?;
        let descriptors = listener::serve_descriptors(dir.path())?;

        let plan = Arc::new(plan);
        let board = Board::new();
        let (running, vmm) = watch::channel(None);
        let surroundings = Arc::new(surroundings);
        let (disks, plugging) = Disks::new(VmPlan::clone(&plan), dir.plan(), surroundings.clone());
        let (network, interfaces) =
            Interfaces::new(plan.clone(), surroundings.network.clone(), dir.path().to_owned());
        tokio::spawn(network.serve());
        let (vm, handle) = Vm::new(
            plan.clone(),
            surroundings.clone(),
            board.clone(),
            running,
            plugging.clone(),
            interfaces.clone(),
        );
        let handle = VmHandle::new(handle, vmm, board.subscribe());
        let service = Service::new(Parts {
            plan,
            surroundings,
            vm: handle.clone(),
            disks: plugging,
            interfaces: interfaces.clone(),
            descriptors,
            console: console.clone(),
        });
        let service = PodServer::new(service).max_decoding_message_size(MESSAGE_BYTES);
        let (finish, finished) = oneshot::channel::<()>();
        let server = Server::builder().serve_with_incoming_shutdown(service, incoming, async {
            let _ = finished.await;
        });
        Ok(Attended {
            vm,
            disks,
            interfaces,
            guest: guest.map(Into::into),
            audience: Audience {
                board,
                finish,
                server: tokio::spawn(server),
            },
            handle,
            console,
        })
    }

    /// The whole life of the VM.
    pub(super) async fn live(self, starter: Starter) -> (Ending, Audience) {
        // The console's actor and the status end with their last handles.
        drop((self.console, self.handle));
        let ending = tokio::select! {
            ending = self.vm.live(self.guest, starter) => ending,
            // Nothing is plugged, and no plan kept, once the VM has ended.
            never = self.disks.serve() => match never {},
        };
        info!(
            phase = ending.phase.as_str_name(),
            reason = ending.reason,
            message = ending.message,
            "the VM ended"
        );
        self.interfaces.close().await;
        (ending, self.audience)
    }
}

impl Audience {
    /// Tells the end to everybody who listens and gives them a moment to hear it.
    pub(super) async fn farewell(self, ending: Ending) {
        self.board.end(ending);
        drop((self.board, self.finish));
        if timeout(FAREWELL, self.server).await.is_err() {
            warn!("a client did not take the final status");
        }
    }
}
