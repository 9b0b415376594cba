//! The control side of a VMM: one actor that owns the machine, its gRPC service and the console pump.

mod actor;
mod config;
mod connection;
mod console;
mod disks;
mod lun;
mod nics;
mod service;

pub use actor::{Actor, Exit};
pub use connection::serve;
pub use service::Handle;
