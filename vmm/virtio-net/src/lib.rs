//! virtio-net (virtio 1.2, section 5.1) over the queues of a tap, with frames moved by vhost-net or by workers of this
//! process.
//!
//! Nothing here opens anything: taps and vhost come as open files, and no capability is needed for what is done to
//! them. The control queue is always served here.

mod active;
mod config;
mod control_command;
mod control_state;
mod control_worker;
mod counters;
mod device;
mod filter;
mod handle;
mod header;
mod pair_worker;
mod rx;
mod rx_buffers;
mod tap;
mod tx;
mod tx_coalescing;
mod used_batch;
mod vhost;

#[cfg(test)]
mod tests;

pub use counters::Counters;
pub use device::{Net, NetSetup, QueuePair};
pub use filter::Mac;
pub use handle::NetHandle;

/// Entries of each receive and transmit queue.
pub const QUEUE_SIZE: u16 = 256;

/// Entries of the control queue.
pub const CONTROL_QUEUE_SIZE: u16 = 64;

/// The most queue pairs of a device: what a tap can have.
pub const MAX_PAIRS: usize = 256;
