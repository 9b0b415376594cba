//! Disk images as the storage devices see them: one asynchronous contract, whatever the format and whichever way
//! the kernel offers to do the I/O.
//!
//! A [`Disk`] is opened from a descriptor somebody else opened, and is a cheap handle to it. Each worker owns an
//! [`Engine`], made once at start, to which it attaches the disks it serves: one for a virtio-blk queue, thousands
//! for a SCSI controller. Disks come and go while others are busy; nothing but the engine needs a ring or a thread.

mod aligned;
mod disk;
mod engine;
mod executor;
mod executors;
mod geometry;
mod mailbox;
mod operation;
mod options;
mod pool;
mod qcow2;
mod reader;
mod request;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod threads;
mod uring;

pub use disk::{Disk, Extent};
pub use engine::{DiskId, Engine, Stopped};
pub use geometry::Geometry;
pub use options::{BlockSize, Cache, EngineKind, ErrorPolicy, Format, Options};
pub use reader::DiskReader;
pub use request::{Buffer, Completion, Request};

/// Bytes of a sector, the unit of virtio-blk's and of the smallest block.
pub const SECTOR: u64 = 512;
