//! virtio-net (virtio 1.2, section 5.1) over the queues of a tap, with frames moved by vhost-net or by workers of this
//! process.
//!
//! This crate opens no files: taps and vhost come as open file descriptors, and no operation on them needs a
//! capability. The control queue is always served by this process.

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
mod mac;
mod pair_worker;
mod pass;
mod rx;
mod rx_buffers;
mod shared_throttle;
mod state;
mod tap;
#[cfg(feature = "testing")]
pub mod testing;
mod tx;
mod tx_coalescing;
mod vhost;

#[cfg(test)]
mod tests;

pub use config::{CONTROL_QUEUE_SIZE, MAX_PAIRS, QUEUE_SIZE};
pub use counters::Counters;
pub use device::{Net, NetSetup, QueuePair};
pub use handle::NetHandle;
pub use mac::Mac;
