//! virtio-vsock with stream sockets (virtio 1.3, section 5.10): connections between ports of the guest and of the host
//! (CID 2). The host's end of each connection is a stream socket.
//!
//! [`VhostVsock`] is the device whose connections the host's kernel carries: there the guest has a CID of the host's
//! AF_VSOCK.
//!
//! This crate opens no files: the sockets come as open file descriptors. Whoever has the device's [`VsockHandle`] makes
//! them, and learns from [`RequestFn`] to which port of the host the guest wants to connect.

#![warn(missing_docs)]

mod connection;
mod connections;
mod credit;
mod device;
mod handle;
mod lingering;
mod packet;
mod queues;
mod vhost;
mod worker;

#[cfg(test)]
mod tests;

pub use connections::{MAX_CONNECTIONS, RequestFn};
pub use device::Vsock;
pub use handle::{VsockError, VsockHandle};
pub use vhost::VhostVsock;
