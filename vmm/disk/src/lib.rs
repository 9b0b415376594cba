//! Disk images for the storage devices: one asynchronous interface for raw and qcow2 images, over io_uring or threads.
//!
//! A [`Disk`] is a cheap handle to an image that was opened from a descriptor. Each worker owns an [`Engine`], created
//! once, and attaches the disks that it serves: one for a virtio-blk queue, thousands for a SCSI controller. Disks come
//! and go while others are busy. Only engines, qcow2 images and block devices have threads or a ring.

#![warn(missing_docs)]

mod aligned_buf;
mod backend_set;
mod blocking_call;
mod completion_queue;
mod counters;
mod discard_thread;
mod disk;
mod engine;
mod extent;
mod geometry;
mod io_backend;
mod operation;
mod options;
mod qcow2;
mod reader;
mod request;
mod synchronous_calls;
mod syncs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod thread_backend;
mod thread_pool;
mod uring_backend;

pub use counters::DiskCounters;
pub use disk::Disk;
pub use engine::{DiskId, Engine, StoppedDisk};
pub use extent::Extent;
pub use geometry::Geometry;
pub use options::{BlockSize, CacheMode, DiskOptions, EngineKind, ErrorPolicy, ImageFormat};
pub use reader::{DiskReader, Qcow2Reader};
pub use request::{IoBuffer, IoCompletion, IoRequest};

/// Bytes of a sector: the unit of virtio-blk and the smallest logical block.
pub const SECTOR: u64 = 512;
