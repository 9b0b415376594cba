//! virtio-blk (virtio 1.2, section 5.2) over any [`husk_disk::Disk`].

mod config;
mod device;
mod request;
mod worker;

pub use device::Blk;

/// Entries of each queue, and so the requests it can have in flight.
pub const QUEUE_SIZE: u16 = 128;
