//! What surrounds one VM: its volumes, its VMM process, its console and the monitor that owns them.
//!
//! ```text
//! launch ──exec──▶ monitor::serve ── volumes ──▶ fds ──▶ VmmProcess ──socketpairs──▶ husk-vmm
//!   ▲ ready or error    │ husk.shim.v1 on pod.sock
//! husk run              └── state::VmDir ◀── state::RuntimeDir::{list, find, sweep} ── client::connect
//! ```

pub mod cgroup;
pub mod client;
pub mod console;
pub mod kvm;
pub mod launch;
mod lock;
pub mod monitor;
pub mod network;
pub mod pod;
pub mod state;
pub mod surroundings;
pub mod vmm_process;
pub mod volumes;
