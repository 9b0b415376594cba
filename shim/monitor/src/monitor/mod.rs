//! The monitor: the background process of `husk run`, which owns one VM until it ends.
//!
//! ```text
//!                    ┌ Service (husk.shim.v1 on pod.sock) ─┐
//! clients ──────────▶│ pause, resume, reset ───────────────┼──▶ VMM (husk.vmm.v1)
//!  descriptors on    │ sync ─▶ all of the following        │      ▲
//!  fds.sock ────────▶│                                     │      │
//!                    │ shutdown, kill ─▶ VmActor ──────────┘      │
//! signals ───────────┼─────────────────▶   │ owns the process ────┤
//!                    │ status ◀── StatusPublisher ◀── events, exit│
//! files that grow ───┼──────────────▶ DisksActor ─────────────────┘
//!                    │ volumes ──────────┘ owns the disk table
//!                    └ interfaces ──▶ InterfacesActor: owns their table and the network namespace
//! ```
//!
//! When the VM has ended, its network is restored and its directory removed before the final status is published, so a
//! client that reads that status finds nothing left. If the monitor is killed, the VMM exits because its control socket
//! closes, scratch disks vanish because they have no name, and the next command restores the network and removes the
//! directory.

mod console_session;
mod disks;
mod downward_metrics;
mod embedded;
mod error_chain;
mod event_log;
mod final_status;
mod guest_agent;
mod guest_channel;
mod handle;
mod heap;
mod interfaces;
mod io_error_retry;
mod listener;
mod metrics;
mod pending_vm;
mod power;
mod replug;
mod resize_watch;
mod service;
mod snapshots;
mod start;
mod status;
mod status_changes;
mod status_stream;
mod stdio;
mod supervisor;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod vm;
mod vm_config;
mod vm_error;
mod vmm_connection;
mod vmm_events;
mod volume_files;
mod vsock;

use std::process::ExitCode;
use std::time::Duration;

use husk_proto::shim::v1::Phase;
use tracing::error;

use crate::launch::{MonitorConfig, RestoreOptions, StartMode, StartReport};
use crate::state::{RuntimeDir, StateError};
use crate::vm_environment::VmEnvironment;

pub use embedded::{EmbeddedVm, EmbeddedVmError, final_status};
pub use guest_agent::AgentHandle;
pub use handle::VmHandle;
pub use pending_vm::{PendingCall, PendingVm, StartRequest, VmiIdentity};
pub use power::LONGEST_GRACE;
use supervisor::{Supervisor, remove_dir};
pub use sync::short as field_lines;
pub use vm_error::VmError;

/// The monitor's `main`, for a program started by [`crate::launch::launch`]: reads its configuration from standard
/// input, leaves the caller's session, reports on standard output and returns when the VM has ended; successfully if
/// the guest powered off.
///
/// Must be called before any thread is started. Logs go through `tracing` to standard error, which becomes the
/// VM's monitor.log as soon as there is one.
pub fn serve() -> ExitCode {
    heap::share_arena();
    // This fails only for the leader of a process group, which a spawned process is not.
    let _ = rustix::process::setsid();
    let start_mode = StartMode::Process;
    let config = match stdio::read_config() {
        Ok(config) => config,
        Err(error) => return give_up(start_mode, "StartFailed", &error),
    };
    stdio::raise_file_limit();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(Duration::from_millis(100))
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return give_up(start_mode, "StartFailed", &error),
    };
    let code = runtime.block_on(run(config, start_mode));
    // A blocking task may still unpack a volume of a VM that has ended.
    runtime.shutdown_background();
    code
}

fn give_up(start_mode: StartMode, reason: &str, error: &dyn std::error::Error) -> ExitCode {
    let message = error_chain::error_chain(error);
    error!(reason, message, "the VM was not started");
    start_mode.report(&StartReport::Failed {
        reason: reason.into(),
        message,
    });
    ExitCode::FAILURE
}

async fn run(config: MonitorConfig, start_mode: StartMode) -> ExitCode {
    let MonitorConfig {
        runtime_dir,
        plan,
        netns,
        vmi,
        snapshot,
        replug_nics,
        plugged_disks,
    } = config;
    let restore = snapshot.map(|directory| RestoreOptions {
        directory,
        replug_nics,
        plugged_disks,
    });
    let claimed = match RuntimeDir::at(runtime_dir).claim(&plan.namespace, &plan.name) {
        Ok(claimed) => claimed,
        Err(error @ StateError::Exists { .. }) => return give_up(start_mode, "AlreadyRunning", &error),
        Err(error) => return give_up(start_mode, "StartFailed", &error),
    };
    let dir = claimed.dir().clone();
    let prepared = stdio::log_to(&dir.monitor_log())
        .and_then(|()| Supervisor::new(plan, &vmi, &dir, VmEnvironment::of_caller(netns), restore));
    let supervisor = match prepared {
        Ok(supervisor) => supervisor,
        Err(error) => {
            remove_dir(claimed);
            return give_up(start_mode, "StartFailed", &error);
        }
    };
    let log = dir.monitor_log();
    let (final_status, status_server) = tokio::select! {
        ended = supervisor.run(start_mode) => ended,
        never = stdio::keep_bounded(&log) => match never {},
    };
    remove_dir(claimed);
    let code = if final_status.phase == Phase::Succeeded {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    };
    status_server.publish_final(final_status).await;
    code
}
