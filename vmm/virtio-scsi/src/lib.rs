//! SCSI disks and CD-ROM drives behind a virtio controller (virtio 1.2, section 5.6).
//!
//! One thread, the actor, owns the table of logical units, their disks and the queues, from the making of the device
//! to its end. The device hands it queues and takes them back; a [`ScsiHandle`] asks it to add, remove and resize
//! disks, whether or not there is a driver.

mod actor;
mod address;
mod config;
mod controller;
mod device;
mod events;
mod handle;
mod memory;
mod port;
mod request;
mod sg;
mod slots;
mod table;
pub mod target;
mod unit;
mod workers;

#[cfg(test)]
mod tests;

pub use address::Address;
pub use device::{OnStop, Scsi, Setup};
pub use handle::{Answer, Error, Info, Removed, ScsiHandle};
pub use sg::{LunError, LunOptions, open_lun};
pub use unit::{HostUnit, Medium, NewUnit};

/// Entries of each queue. With a data descriptor for each page, a request of 1 MiB fits.
pub const QUEUE_SIZE: u16 = 256;

/// Most request queues, all served by one thread.
pub const MAX_REQUEST_QUEUES: u16 = 8;
