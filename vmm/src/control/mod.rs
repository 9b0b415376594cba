//! The control side of a VMM: the gRPC service, the console and the clocks on the runtime's
//! thread, and the VM on the machine's thread.

mod clocks;
mod config;
mod connection;
mod console;
mod discs;
mod disks;
mod events;
mod fields;
mod nics;
mod passthrough;
mod ports;
mod precopy;
mod request_files;
mod saved;
mod service;
mod transfer;
mod vm;
mod vsock;

pub use connection::run;
#[cfg(feature = "testing")]
pub use saved::SavedVm;
pub use vm::VmExit;
