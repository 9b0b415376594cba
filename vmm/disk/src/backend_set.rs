//! Routes an engine's calls to the backend for plain files or to threads of the image: a qcow2 image has threads for
//! all calls, a block device has one for discards.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::completion_queue::CompletionQueue;
use crate::discard_thread::DiscardThread;
use crate::disk::ImageBackend;
use crate::io_backend::{IoBackend, IoCall};
use crate::qcow2::Qcow2Image;

/// The backend for plain files and the threads of all attached images.
#[derive(Debug)]
pub(crate) struct BackendSet {
    files: Box<dyn IoBackend>,
    /// Created for the first image with threads.
    image_backends: Option<ImageBackends>,
}

/// The attached images with threads of their own.
#[derive(Debug)]
struct ImageBackends {
    completions: Arc<CompletionQueue>,
    /// Results taken from the queue and not popped yet.
    done: VecDeque<(u16, i32)>,
    /// Indexed by slot.
    images: Vec<Option<ImageThreads>>,
    pushed: Vec<(u16, u32, IoCall)>,
    running: usize,
    /// Readable when the completion queue or the backend for plain files is.
    combined_event: CombinedEvent,
}

/// The threads of an image.
#[derive(Clone, Debug)]
enum ImageThreads {
    Qcow2(Arc<Qcow2Image>),
    /// Of a block device, which is also attached to the backend for plain files.
    Discard(RawFd, Arc<DiscardThread>),
}

struct CombinedEvent(Epoll);

impl std::fmt::Debug for CombinedEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CombinedEvent")
    }
}

impl ImageBackends {
    fn new(files: &dyn IoBackend) -> io::Result<Self> {
        let completions = CompletionQueue::new()?;
        let epoll = Epoll::new()?;
        for event in [files.event(), completions.event()] {
            epoll.ctl(
                ControlOperation::Add,
                event.as_raw_fd(),
                EpollEvent::new(EventSet::IN, 0),
            )?;
        }
        Ok(Self {
            completions: Arc::new(completions),
            done: VecDeque::new(),
            images: Vec::new(),
            pushed: Vec::new(),
            running: 0,
            combined_event: CombinedEvent(epoll),
        })
    }

    fn image(&self, slot: u32) -> Option<&ImageThreads> {
        self.images.get(slot as usize)?.as_ref()
    }

    fn set_image(&mut self, slot: u32, image: Option<ImageThreads>) {
        let index = slot as usize;
        if self.images.len() <= index {
            self.images.resize(index + 1, None);
        }
        self.images[index] = image;
    }

    /// True if the threads of the image in `slot` execute `call`.
    fn execute(&self, slot: u32, call: &IoCall) -> bool {
        match self.image(slot) {
            Some(ImageThreads::Qcow2(_)) => true,
            Some(ImageThreads::Discard(..)) => matches!(call, IoCall::Allocate { hint: true, .. }),
            None => false,
        }
    }

    fn submit(&mut self) -> bool {
        let any = !self.pushed.is_empty();
        for (tag, slot, call) in self.pushed.drain(..) {
            match (self.images.get(slot as usize), call) {
                // SAFETY: by the contract of `BackendSet::push`.
                (Some(Some(ImageThreads::Qcow2(image))), call) => unsafe {
                    image.start(tag, call, &self.completions);
                },
                (Some(Some(ImageThreads::Discard(device, thread))), IoCall::Allocate { offset, len, .. }) => {
                    thread.start(tag, *device, [offset, len], &self.completions);
                }
                _ => continue,
            }
            self.running += 1;
        }
        any
    }
}

impl BackendSet {
    pub fn new(files: Box<dyn IoBackend>) -> Self {
        let image_backends = None;
        Self {
            files,
            image_backends,
        }
    }

    /// See [`IoBackend::max_files`].
    pub fn max_files(&self) -> u32 {
        self.files.max_files()
    }

    /// See [`IoBackend::attach`]. The first image with threads changes the descriptor that [`BackendSet::event`]
    /// returns.
    pub fn attach(&mut self, slot: u32, backend: &ImageBackend) -> io::Result<()> {
        let (file, image) = match backend {
            ImageBackend::File(file) => return self.files.attach(slot, file.as_fd()),
            ImageBackend::Device(file, thread) => {
                let image = ImageThreads::Discard(file.as_raw_fd(), Arc::clone(thread));
                (Some(file), image)
            }
            ImageBackend::Qcow2(image) => (None, ImageThreads::Qcow2(Arc::clone(image))),
        };
        let image_backends = match &mut self.image_backends {
            Some(image_backends) => image_backends,
            none => none.insert(ImageBackends::new(&*self.files)?),
        };
        if let Some(file) = file {
            self.files.attach(slot, file.as_fd())?;
        }
        image_backends.set_image(slot, Some(image));
        Ok(())
    }

    /// See [`IoBackend::detach`].
    pub fn detach(&mut self, slot: u32) -> io::Result<()> {
        let image = self
            .image_backends
            .as_ref()
            .and_then(|backends| backends.image(slot));
        if !matches!(image, Some(ImageThreads::Qcow2(_))) {
            self.files.detach(slot)?;
        }
        if let Some(image_backends) = &mut self.image_backends {
            image_backends.set_image(slot, None);
        }
        Ok(())
    }

    /// See [`IoBackend::set_disks`].
    pub fn set_disks(&mut self, disks: usize) {
        self.files.set_disks(disks);
    }

    /// See [`IoBackend::push`].
    ///
    /// # Safety
    /// As for [`IoBackend::push`].
    pub unsafe fn push(&mut self, tag: u16, slot: u32, call: IoCall) {
        match &mut self.image_backends {
            Some(image_backends) if image_backends.execute(slot, &call) => {
                image_backends.pushed.push((tag, slot, call))
            }
            // SAFETY: by this function's contract.
            _ => unsafe { self.files.push(tag, slot, call) },
        }
    }

    /// See [`IoBackend::submit`].
    pub fn submit(&mut self) -> io::Result<bool> {
        let any = self.image_backends.as_mut().is_some_and(ImageBackends::submit);
        Ok(self.files.submit()? || any)
    }

    /// See [`IoBackend::pop`].
    pub fn pop(&mut self) -> Option<(u16, i32)> {
        if let Some(image_backends) = &mut self.image_backends
            // The queue has a lock.
            && image_backends.running > 0
            && let Some(done) = image_backends.completions.pop(&mut image_backends.done)
        {
            image_backends.running -= 1;
            return Some(done);
        }
        self.files.pop()
    }

    /// See [`IoBackend::running`].
    pub fn running(&self) -> usize {
        self.files.running()
            + self
                .image_backends
                .as_ref()
                .map_or(0, |image_backends| image_backends.running)
    }

    /// See [`IoBackend::event`].
    pub fn event(&self) -> BorrowedFd<'_> {
        match &self.image_backends {
            // SAFETY: the epoll stays open as long as it is borrowed.
            Some(image_backends) => unsafe {
                BorrowedFd::borrow_raw(image_backends.combined_event.0.as_raw_fd())
            },
            None => self.files.event(),
        }
    }
}
