//! The background half of `husk run`: owns one VM until it ends.
//!
//! ```text
//!                    ┌ Service (husk.shim.v1 on pod.sock) ─┐
//! clients ──────────▶│ pause, resume, reset ───────────────┼──▶ VMM (husk.vmm.v1)
//!  descriptors on    │ sync ─▶ all of what follows         │      ▲
//!  fds.sock ────────▶│                                     │      │
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

mod attended;
mod disks;
mod ending;
mod growth;
mod handle;
mod host;
mod interfaces;
mod listener;
mod metrics;
mod power;
mod service;
mod session;
mod start;
mod status;
mod stdio;
mod sync;
mod vm;
mod vm_config;
mod vmm_link;
mod watching;

use std::process::ExitCode;
use std::time::Duration;

use husk_proto::shim::v1::Phase;
use tracing::error;

use crate::launch::{MonitorConfig, Report, Starter};
use crate::state::{ClaimedDir, RuntimeDir, StateError};
use crate::surroundings::Surroundings;

use attended::Attended;
pub use handle::VmHandle;
pub use host::{HostError, Hosted, final_status};

/// The monitor's `main`, for a program started by [`crate::launch::launch`]: reads its configuration from standard
/// input, leaves the caller's session, reports on standard output and returns when the VM has ended; successfully if
/// the guest powered off.
///
/// Must be called before any thread is started. Logs go through `tracing` to standard error, which becomes the
/// VM's monitor.log as soon as there is one.
pub fn serve() -> ExitCode {
    // It fails only for a process group's leader, which a spawned process is not.
    let _ = rustix::process::setsid();
    let starter = Starter::Process;
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
    let prepared = stdio::log_to(&dir.monitor_log())
        .and_then(|()| Attended::new(plan, &vmi, &dir, Surroundings::of_the_caller(netns)));
    let attended = match prepared {
        Ok(attended) => attended,
        Err(error) => {
            remove(claimed);
            return give_up(starter, "StartFailed", &error);
        }
    };
    let log = dir.monitor_log();
    let (ending, audience) = tokio::select! {
        ended = attended.live(starter) => ended,
        never = stdio::keep_bounded(&log) => match never {},
    };
    remove(claimed);
    let code = if ending.phase == Phase::Succeeded {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    };
    audience.farewell(ending).await;
    code
}

fn remove(claimed: ClaimedDir) {
    let path = claimed.dir().path().to_owned();
    if let Err(error) = claimed.remove() {
        // The lock ends with this process, so the next sweep tries again.
        error!(dir = %path.display(), %error, "the state directory stays");
    }
}
