//! The monitor of one VM: it owns the VMM process, the console and the VM's directory.
//!
//! ```text
//! launch ──exec──▶ monitor::serve ── husk_volumes ──▶ fds ──▶ VmmProcess ──socketpairs──▶ husk-vmm
//!   ▲ ready or error    │ husk.shim.v1 on pod.sock
//! husk run              └── state::VmDir ◀── state::RuntimeDir::{list, find, remove_abandoned} ── client::connect
//! ```

pub mod client;
pub mod console;
pub mod kvm;
pub mod launch;
mod log_rate_limiter;
pub mod monitor;
pub mod program;
pub mod snapshot;
pub mod state;
pub mod vm_environment;
pub mod vmm_process;
