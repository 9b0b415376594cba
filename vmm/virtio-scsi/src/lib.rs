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
mod handle;
mod lun_table;
mod memory;
mod passthrough_workers;
mod pending_events;
mod request;
mod sg_device;
pub mod target;
mod task_slots;
mod unit;
mod virtqueues;

#[cfg(test)]
mod tests;

pub use address::UnitAddress;
pub use device::{OnIoError, ScsiConfig, VirtioScsi};
pub use handle::{RemovedUnit, ReplyFuture, ScsiError, ScsiHandle, UnitInfo};
pub use sg_device::{LunError, LunOptions, open_lun};
pub use unit::{Medium, NewUnit, PassthroughUnit};

/// Entries of each queue. With a data descriptor for each page, a request of 1 MiB fits.
pub const QUEUE_SIZE: u16 = 256;

/// Most request queues, all served by one thread.
pub const MAX_REQUEST_QUEUES: u16 = 8;
