//! qcow2 images, through imago: an overlay over one base, or an image without a base.
//!
//! imago's calls block, so each image has threads of its own. They start when the image is opened, with the privileges
//! of the thread that opens it. They serve every engine that the image is attached to and put results into that
//! engine's completion queue.

use std::fs::File;
use std::io;
use std::sync::Arc;

use husk_seccomp::ThreadRole;

use crate::completion_queue::CompletionQueue;
use crate::io_backend::IoCall;
use crate::thread_pool::ThreadPool;
use crate::{DiskOptions, Extent, Geometry, ImageFormat};

mod content;
mod file_storage;
mod header;
mod open;
#[cfg(test)]
mod tests;

pub(crate) use content::ImageContent;
pub(crate) use open::{CLUSTER, create};

/// Maximum calls that run at once.
const THREADS: usize = 8;

/// Bytes of a thread's stack. Inflating a cluster takes about 50 KiB.
const STACK: usize = 512 << 10;

/// An open image and its threads.
#[derive(Debug)]
pub(crate) struct Qcow2Image {
    // Before `content`, so that it is dropped first: the threads end before the image is closed.
    pool: ThreadPool<Job>,
    content: Arc<ImageContent>,
}

#[derive(Debug)]
struct Job {
    tag: u16,
    call: IoCall,
    answer: Arc<CompletionQueue>,
}

impl Qcow2Image {
    /// See [`Disk::open_qcow2`](crate::Disk::open_qcow2).
    pub fn open(
        file: File,
        base: Option<(File, ImageFormat)>,
        options: DiskOptions,
    ) -> io::Result<(Self, Geometry)> {
        Self::serve(ImageContent::open(file, base, options)?)
    }

    /// See [`Disk::new_overlay`](crate::Disk::new_overlay).
    pub fn overlay(
        file: File,
        base: File,
        format: ImageFormat,
        options: DiskOptions,
    ) -> io::Result<(Self, Geometry)> {
        Self::serve(ImageContent::overlay(file, base, format, options)?)
    }

    fn serve(content: ImageContent) -> io::Result<(Self, Geometry)> {
        let geometry = content.geometry();
        let content = Arc::new(content);
        let image = Arc::clone(&content);
        let pool = ThreadPool::new(ThreadRole::Qcow2, "qcow2", (THREADS, STACK), move |job| {
            let Job { tag, call, answer } = job;
            // SAFETY: the caller of `start` keeps the memory of the call until the result below is there.
            let result = unsafe { image.perform(call) };
            answer.put(tag, result);
        })?;
        Ok((Self { pool, content }, geometry))
    }

    /// Starts a call. Its result goes to `answer`.
    ///
    /// # Safety
    /// Until then the call's iovecs and the memory that they name stay valid.
    pub unsafe fn start(&self, tag: u16, call: IoCall, answer: &Arc<CompletionQueue>) {
        let answer = Arc::clone(answer);
        self.pool.push([Job { tag, call, answer }].into_iter());
    }

    /// See [`DiskReader::read_at`](crate::DiskReader::read_at); the range is on the disk.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.content.read(offset, buf)
    }

    /// See [`Disk::write_back`](crate::Disk::write_back).
    pub fn write_back(&self) -> io::Result<()> {
        self.content.write_back()
    }

    /// True if an fdatasync of the image's file failed.
    pub fn sync_failed(&self) -> bool {
        self.content.sync_failed()
    }

    /// See [`Disk::extent`](crate::Disk::extent); `offset` is on the disk.
    pub fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.content.extent(offset)
    }
}
