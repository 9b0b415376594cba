//! The threads that look for the allocated parts of a disk's image.
//!
//! The file system may hang in such a call while its storage does not answer. The controller serves other disks, too, so
//! it does not wait.

use std::io;
use std::thread;

use husk_disk::Disk;
use husk_seccomp::{ThreadRole, install};

use crate::passthrough_workers::{CompletionSender, FinishedJob, JobResult};
use crate::target::Extent;

/// Maximum number of threads of a controller.
pub(crate) const MAX_QUERIES: usize = 16;

/// A query of the extent at a byte of a disk.
pub(crate) struct ExtentQuery {
    pub disk: Disk,
    pub offset: u64,
}

impl ExtentQuery {
    /// Starts a thread that sends the answer for `tag`.
    ///
    /// # Errors
    /// The kernel starts no thread.
    pub fn start(self, tag: u16, completions: CompletionSender) -> io::Result<()> {
        let Self { disk, offset } = self;
        let thread = thread::Builder::new().name("extent".into()).stack_size(256 << 10);
        let started = thread.spawn(move || {
            install(ThreadRole::Qcow2);
            let extent = disk.extent(offset).map(|extent| Extent {
                allocated: extent.allocated,
                len: extent.len,
            });
            // Before the answer: after it, the disk may be removed, and its last handle closed.
            drop(disk);
            let end = JobResult::Extent(extent);
            completions.finish(FinishedJob { tag, end });
        });
        // Not the error of a medium.
        started.map(drop).map_err(|_| io::ErrorKind::OutOfMemory.into())
    }
}
