//! The background half of `husk run`: owns one VM until it ends.
//!
//! ```text
//!                    ┌ Service (husk.shim.v1 on pod.sock) ─┐
//! clients ──────────▶│ pause, resume, reset ───────────────┼──▶ VMM (husk.vmm.v1)
//!                    │ shutdown, kill ─▶ Vm actor ─────────┘      ▲
//! signals ───────────┼─────────────────▶   │ owns the process ────┤
//!                    │ status ◀── Board ◀──┘ events, exit         │
//! files that grow ───┼──────────────▶ Disks actor ────────────────┘
//!                    │ volumes ──────────┘ owns the table
//!                    └ interfaces ──▶ Interfaces actor: owns theirs, and the pod's namespace
//! ```
//!
//! When the VM has ended, however it did, its network is given back and its state directory removed first, and the final
//! status told last, so whoever hears of the end finds nothing left. Where the monitor itself is killed, the VMM ends
//! with its control socket, scratch disks vanish because they have no name, and the next command gives back the network
//! and sweeps the directory.

mod disks;
mod ending;
mod growth;
mod interfaces;
mod listener;
mod power;
mod service;
mod session;
mod start;
mod status;
mod stdio;
mod vm;
mod vm_config;
mod vmm_link;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use husk_proto::shim::v1::Phase;
use husk_proto::shim::v1::pod_server::PodServer;
use husk_vmi::VmPlan;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;
use tonic::transport::Server;
use tracing::{error, info, warn};

use crate::console::Console;
use crate::launch::{MonitorConfig, Report, Starter};
use crate::state::{ClaimedDir, RuntimeDir, StateError};
use crate::volumes::Scratch;

use disks::Disks;
use ending::Ending;
use interfaces::Interfaces;
use service::Service;
use status::Board;
use vm::Vm;

/// How long clients have to take the final status.
const FAREWELL: Duration = Duration::from_secs(2);
/// A message to the monitor is a line of typing at most.
const MESSAGE_BYTES: usize = 128 << 10;

/// The monitor's `main`, for a program started by [`crate::launch::launch`]: reads its configuration from standard
/// input, leaves the caller's session, reports on standard output and returns when the VM has ended; successfully if
/// the guest powered off.
///
/// Must be called before any thread is started. Logs go through `tracing` to standard error, which becomes the
/// VM's monitor.log as soon as there is one.
pub fn serve() -> ExitCode {
    // It fails only for a process group's leader, which a spawned process is not.
    let _ = rustix::process::setsid();
    let starter = Starter::new();
    let config = match stdio::read_config() {
        Ok(config) => config,
        Err(error) => return give_up(starter, "StartFailed", &error),
    };
    stdio::raise_file_limit();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(Duration::from_millis(100))
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return give_up(starter, "StartFailed", &error),
    };
    let code = runtime.block_on(run(config, starter));
    // A volume may still be unpacked for a VM that was ended meanwhile.
    runtime.shutdown_background();
    code
}

fn give_up(starter: Starter, reason: &str, error: &dyn std::error::Error) -> ExitCode {
    let message = ending::chain(error);
    error!(reason, message, "the VM was not started");
    starter.report(&Report::Failed {
        reason: reason.into(),
        message,
    });
    ExitCode::FAILURE
}

async fn run(config: MonitorConfig, starter: Starter) -> ExitCode {
    let MonitorConfig {
        runtime_dir,
        plan,
        netns,
        vmi,
    } = config;
    let claimed = match RuntimeDir::at(runtime_dir).claim(&plan.namespace, &plan.name) {
        Ok(claimed) => claimed,
        Err(error @ StateError::Exists { .. }) => return give_up(starter, "AlreadyRunning", &error),
        Err(error) => return give_up(starter, "StartFailed", &error),
    };
    let dir = claimed.dir().clone();
    let prepared = async {
        stdio::log_to(&dir.monitor_log())?;
        stdio::write_json(&dir.plan(), &plan)?;
        stdio::write_json(&dir.vmi(), &vmi)?;
        let (guest, console) = UnixStream::pair()?;
        let console = plan
            .serial_console
            .then(|| Console::start(console, dir.console_log()));
        let guest = plan.serial_console.then(|| guest.into_std()).transpose()?;
        Ok::<_, std::io::Error>((listener::bind(dir.path())?, console, guest))
    };
    let (incoming, console, guest) = match prepared.await {
        Ok(prepared) => prepared,
        Err(error) => {
            remove(claimed);
            return give_up(starter, "StartFailed", &error);
        }
    };

    let plan = Arc::new(plan);
    let board = Board::new();
    let (running, vmm) = watch::channel(None);
    let (disks, plugging) = Disks::new(VmPlan::clone(&plan), dir.plan());
    let (network, interfaces) = Interfaces::new(plan.clone(), netns, dir.path().to_owned());
    tokio::spawn(network.serve());
    let (vm, handle) = Vm::new(
        plan.clone(),
        Scratch::locate(),
        board.clone(),
        running,
        plugging.clone(),
        interfaces.clone(),
    );
    let service = Service::new(
        plan,
        handle,
        plugging,
        interfaces.clone(),
        vmm,
        console,
        board.subscribe(),
    );
    let service = PodServer::new(service).max_decoding_message_size(MESSAGE_BYTES);
    let (finish, finished) = oneshot::channel::<()>();
    let server = Server::builder().serve_with_incoming_shutdown(service, incoming, async {
        let _ = finished.await;
    });
    let server = tokio::spawn(server);

    let log = dir.monitor_log();
    let ending = tokio::select! {
        ending = vm.live(guest.map(Into::into), starter) => ending,
        never = stdio::keep_bounded(&log) => match never {},
        // Nothing is plugged, and no plan kept, once the VM has ended.
        never = disks.serve() => match never {},
    };
    info!(
        phase = ending.phase.as_str_name(),
        reason = ending.reason,
        message = ending.message,
        "the VM ended"
    );
    interfaces.close().await;
    remove(claimed);
    let code = if ending.phase == Phase::Succeeded {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    };
    farewell(board, ending, finish, server).await;
    code
}

/// Tells the end to everybody who listens and gives them a moment to hear it.
async fn farewell<T>(
    board: Board,
    ending: Ending,
    finish: oneshot::Sender<()>,
    server: tokio::task::JoinHandle<T>,
) {
    board.end(ending);
    drop((board, finish));
    if timeout(FAREWELL, server).await.is_err() {
        warn!("a client did not take the final status");
    }
}

fn remove(claimed: ClaimedDir) {
    let path = claimed.dir().path().to_owned();
    if let Err(error) = claimed.remove() {
        // The lock ends with this process, so the next sweep tries again.
        error!(dir = %path.display(), %error, "the state directory stays");
    }
}
