//! qcow2 images, by way of imago: an overlay over one base, or an image by itself.
//!
//! imago's calls block, so an image has threads of its own, made when it is opened: whoever confines the process does it
//! then. They serve every engine the image is attached to, and leave results where that engine looks for them.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use crate::executor::Call;
use crate::mailbox::{Mailbox, lock};
use crate::{Extent, Format, Geometry, Options};

mod header;
mod image;
mod open;
mod store;
#[cfg(test)]
mod tests;

use image::Content;
pub(crate) use open::{CLUSTER, create};

/// Calls that run at once.
const THREADS: usize = 8;

/// Bytes of a thread's stack. Inflating a cluster takes some 50 KiB of it.
const STACK: usize = 512 << 10;

/// An open image and its threads.
#[derive(Debug)]
pub(crate) struct Image {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    content: Content,
    jobs: Mutex<Jobs>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Jobs {
    queue: VecDeque<Job>,
    stop: bool,
}

#[derive(Debug)]
struct Job {
    tag: u16,
    call: Call,
    answer: Arc<Mailbox>,
}

impl Image {
    /// See [`Disk::open_qcow2`](crate::Disk::open_qcow2).
    pub fn open(file: File, base: Option<(File, Format)>, options: Options) -> io::Result<(Self, Geometry)> {
        Self::serve(Content::open(file, base, options)?)
    }

    /// See [`Disk::new_overlay`](crate::Disk::new_overlay).
    pub fn overlay(file: File, base: File, format: Format, options: Options) -> io::Result<(Self, Geometry)> {
        Self::serve(Content::overlay(file, base, format, options)?)
    }

    fn serve(content: Content) -> io::Result<(Self, Geometry)> {
        let geometry = content.geometry();
        let shared = Arc::new(Shared {
            content,
            jobs: Mutex::default(),
            wake: Condvar::new(),
        });
        // Made first, so that a thread that cannot be made ends those that could.
        let mut image = Self {
            shared,
            threads: Vec::new(),
        };
        for _ in 0..THREADS {
            let shared = Arc::clone(&image.shared);
            let thread = thread::Builder::new().name("qcow2".into()).stack_size(STACK);
            image.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok((image, geometry))
    }

    /// Has a call carried out, and its result put into `answer`.
    ///
    /// # Safety
    /// Until then the call's iovecs and the memory they name stay valid.
    pub unsafe fn start(&self, tag: u16, call: Call, answer: &Arc<Mailbox>) {
        let answer = Arc::clone(answer);
        lock(&self.shared.jobs).queue.push_back(Job { tag, call, answer });
        self.shared.wake.notify_one();
    }

    /// See [`DiskReader::read_at`](crate::DiskReader::read_at); the range lies on the disk.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.shared.content.read(offset, buf)
    }

    /// See [`Disk::extent`](crate::Disk::extent); `offset` lies on the disk.
    pub fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.shared.content.extent(offset)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        lock(&self.shared.jobs).stop = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        while let Some(Job { tag, call, answer }) = self.next() {
            // SAFETY: whoever started the call keeps its memory until the result below is there.
            let result = unsafe { self.content.perform(call) };
            answer.put(tag, result);
        }
    }

    fn next(&self) -> Option<Job> {
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(job) = jobs.queue.pop_front() {
                return Some(job);
            }
            if jobs.stop {
                return None;
            }
            jobs = self.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
