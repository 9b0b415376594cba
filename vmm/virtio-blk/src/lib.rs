//! virtio-blk (virtio 1.2, section 5.2) over any [`husk_disk::Disk`].

mod config;
mod device;
mod handle;
mod queue_io;
mod request;
mod setup;
mod state;
mod worker;

pub use config::QUEUE_SIZE;
pub use device::Blk;
pub use handle::BlkHandle;
pub use setup::{BlkSetup, OnIoStop};
