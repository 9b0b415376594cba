//! SCSI disks, CD-ROM drives and passthrough devices behind a virtio controller (virtio 1.2, section 5.6).
//!
//! One thread, the actor, owns the logical units, their disks and the queues as long as the device exists. The device
//! gives it the queues and takes them back. A [`ScsiHandle`] adds, removes and resizes disks, with or without a driver.
//! CDBs are decoded in [`target`].

mod actor;
mod address;
mod config;
mod controller;
mod device;
mod extent_query;
mod handle;
mod lun_table;
mod memory;
mod new_unit;
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
pub use controller::OnIoError;
pub use device::{MAX_DISKS, ScsiConfig, VirtioScsi};
pub use handle::{RemovedUnit, ReplyFuture, ScsiError, ScsiHandle, UnitInfo};
pub use new_unit::{Medium, NewUnit, PassthroughUnit};
pub use sg_device::{LunError, LunOptions, open_lun};

/// Entries of each queue. A request of 1 MiB fits, with a data descriptor for each page.
pub const QUEUE_SIZE: u16 = 256;

/// Maximum number of request queues. One thread serves all of them.
pub const MAX_REQUEST_QUEUES: u16 = 8;
