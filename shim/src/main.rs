//! `containerd-shim-husk-v2`: pods as VMs, for containerd.
//!
//! ```text
//! containerd ── start ──▶ bootstrap ── exec with a listening socket ──▶ serve: one process for all containers of a pod
//!            ── ttrpc: containerd.task.v3 (and .v2) ──▶ task::Service ──▶ Pod actor ──▶ husk_monitor: EmbeddedVm
//!            ◀─ events ── publisher ◀──────────────────────────────────────┘
//!            ── delete ─▶ cleanup after a pod whose shim was killed
//! ```

mod bootstrap;
mod bundle;
mod cleanup;
mod logging;
mod mount;
mod pod;
mod publisher;
mod serve;
mod spec;
mod stdio;
mod task;

use std::io::{self, Write};
use std::process::ExitCode;

use bootstrap::{Action, Flags};

fn main() -> ExitCode {
    let done = match Flags::parse(std::env::args().skip(1)) {
        Ok(flags) => match flags.action {
            Action::Version => {
                print(format!("containerd-shim-husk-v2 {}\n", env!("CARGO_PKG_VERSION")).as_bytes())
            }
            Action::Info => bootstrap::info().and_then(|info| print(&info)),
            Action::Start => bootstrap::start(&flags).and_then(|reply| print(&reply)),
            Action::Delete => cleanup::delete(&flags).and_then(|answer| print(&answer)),
            Action::Serve => return serve::serve(flags),
        },
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "containerd-shim-husk-v2: {error}");
            ExitCode::FAILURE
        }
    }
}

fn print(bytes: &[u8]) -> Result<(), String> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(bytes).and_then(|()| stdout.flush());
    written.map_err(|error| format!("standard output: {error}"))
}
