//! Devices of the kernel's vhost: the kernel reads and writes the rings and guest memory itself. It gets the driver's
//! notifications and interrupts as eventfds, so that no buffer passes through this process.
//!
//! This crate has what all of them share. Connecting the queues to a tap or to sockets is the device's own.

#![warn(missing_docs)]

mod call;
mod file;
mod rings;

pub use call::{VhostCall, call_event};
pub use file::{VhostFile, VringNotifiers};
