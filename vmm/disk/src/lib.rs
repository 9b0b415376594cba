//! Disk images as the storage devices see them: one asynchronous contract, whatever the format and whichever way
//! the kernel offers to do the I/O.
//!
//! A [`Disk`] is opened from a descriptor somebody else opened, and is a cheap handle to it. Each worker owns an
//! [`Engine`], made once at start, to which it attaches the disks it serves: one for a virtio-blk queue, thousands
//! for a SCSI controller. Disks come and go while others are busy; nothing but the engine needs a ring or a thread.

mod aligned_buf;
mod backend_set;
mod completion_queue;
mod disk;
mod engine;
mod geometry;
mod io_backend;
mod operation;
mod options;
mod qcow2;
mod reader;
mod request;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod thread_backend;
mod thread_pool;
mod uring_backend;

pub use disk::{Disk, Extent};
pub use engine::{DiskId, Engine, StoppedDisk};
pub use geometry::Geometry;
pub use options::{BlockSize, CacheMode, DiskOptions, EngineKind, ErrorPolicy, ImageFormat};
pub use reader::DiskReader;
pub use request::{IoBuffer, IoCompletion, IoRequest};

/// Bytes of a sector, the unit of virtio-blk's and of the smallest block.
pub const SECTOR: u64 = 512;
