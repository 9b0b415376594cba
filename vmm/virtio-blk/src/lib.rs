//! virtio-blk (virtio 1.2, section 5.2) over any [`husk_disk::Disk`].

mod config;
mod device;
mod handle;
mod queue_io;
mod request;
mod worker;

pub use device::{Blk, BlkSetup, OnIoStop};
pub use handle::BlkHandle;

/// Entries of each queue, and so the requests it can have in flight. With a data descriptor for each page, a request
/// of 1 MiB fits.
pub const QUEUE_SIZE: u16 = 256;
