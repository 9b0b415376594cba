//! The control side of a VMM: one actor that owns the machine, its gRPC service and the console pump.

mod actor;
mod config;
mod connection;
mod console;
mod discs;
mod disks;
mod fields;
mod nics;
mod passthrough;
mod ports;
mod service;
mod vsock;

pub use actor::VmExit;
pub use connection::run;
