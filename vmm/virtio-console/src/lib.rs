//! virtio-console with several ports (virtio 1.2, section 5.3): each port is a named stream of bytes between the guest
//! and a socket of the host.
//!
//! Ports have the numbers 1 and up. Number 0 is left to a console, which the device does not have: drivers give it a
//! meaning of its own.
//!
//! This crate opens no files: the sockets come as open file descriptors.

#![warn(missing_docs)]

mod config;
mod control;
mod device;
mod port;
mod state;
mod worker;

#[cfg(test)]
mod tests;

pub use config::{MAX_NAME_LEN, MAX_PORTS};
pub use device::{Console, GuestOpenFn, PortSetup};
