//! Routes an engine's calls to the backend for plain files or to the threads of a qcow2 image.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::completion_queue::CompletionQueue;
use crate::disk::ImageBackend;
use crate::io_backend::{IoBackend, IoCall};
use crate::qcow2::Qcow2Image;

/// The backend for plain files and the threads of all attached qcow2 images.
#[derive(Debug)]
pub(crate) struct BackendSet {
    files: Box<dyn IoBackend>,
    /// Created for the first qcow2 image.
    format_backends: Option<FormatBackends>,
}

/// The qcow2 images that are attached, each with threads of its own.
#[derive(Debug)]
struct FormatBackends {
    completions: Arc<CompletionQueue>,
    /// Results taken from the queue and not popped yet.
    done: VecDeque<(u16, i32)>,
    /// Indexed by slot.
    images: Vec<Option<Arc<Qcow2Image>>>,
    pushed: Vec<(u16, u32, IoCall)>,
    running: usize,
    /// Readable when the completion queue or the backend for plain files is.
    combined_event: CombinedEvent,
}

struct CombinedEvent(Epoll);

impl std::fmt::Debug for CombinedEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CombinedEvent")
    }
}

impl FormatBackends {
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

    fn serves(&self, slot: u32) -> bool {
        matches!(self.images.get(slot as usize), Some(Some(_)))
    }

    fn submit(&mut self) -> bool {
        let any = !self.pushed.is_empty();
        for (tag, slot, call) in self.pushed.drain(..) {
            if let Some(Some(image)) = self.images.get(slot as usize) {
                self.running += 1;
                // SAFETY: by the contract of `BackendSet::push`.
                unsafe { image.start(tag, call, &self.completions) };
            }
        }
        any
    }
}

impl BackendSet {
    pub fn new(files: Box<dyn IoBackend>) -> Self {
        let format_backends = None;
        Self {
            files,
            format_backends,
        }
    }

    /// See [`IoBackend::max_files`].
    pub fn max_files(&self) -> u32 {
        self.files.max_files()
    }

    /// See [`IoBackend::attach`]. The first qcow2 image changes the descriptor that [`BackendSet::event`] returns.
    pub fn attach(&mut self, slot: u32, backend: &ImageBackend) -> io::Result<()> {
        let image = match backend {
            ImageBackend::File(file) => return self.files.attach(slot, file.as_fd()),
            ImageBackend::Qcow2(image) => Arc::clone(image),
        };
        let format_backends = match &mut self.format_backends {
            Some(format_backends) => format_backends,
            none => none.insert(FormatBackends::new(&*self.files)?),
        };
        let index = slot as usize;
        if format_backends.images.len() <= index {
            format_backends.images.resize(index + 1, None);
        }
        format_backends.images[index] = Some(image);
        Ok(())
    }

    /// See [`IoBackend::detach`].
    pub fn detach(&mut self, slot: u32) -> io::Result<()> {
        match &mut self.format_backends {
            Some(format_backends) if format_backends.serves(slot) => {
                format_backends.images[slot as usize] = None;
                Ok(())
            }
            _ => self.files.detach(slot),
        }
    }

    /// See [`IoBackend::push`].
    ///
    /// # Safety
    /// As for [`IoBackend::push`].
    pub unsafe fn push(&mut self, tag: u16, slot: u32, call: IoCall) {
        match &mut self.format_backends {
            Some(format_backends) if format_backends.serves(slot) => {
                format_backends.pushed.push((tag, slot, call))
            }
            // SAFETY: by this function's contract.
            _ => unsafe { self.files.push(tag, slot, call) },
        }
    }

    /// See [`IoBackend::submit`].
    pub fn submit(&mut self) -> io::Result<bool> {
        let any = self.format_backends.as_mut().is_some_and(FormatBackends::submit);
        Ok(self.files.submit()? || any)
    }

    /// See [`IoBackend::pop`].
    pub fn pop(&mut self) -> Option<(u16, i32)> {
        if let Some(format_backends) = &mut self.format_backends
            && let Some(done) = format_backends.completions.pop(&mut format_backends.done)
        {
            format_backends.running -= 1;
            return Some(done);
        }
        self.files.pop()
    }

    /// See [`IoBackend::running`].
    pub fn running(&self) -> usize {
        self.files.running()
            + self
                .format_backends
                .as_ref()
                .map_or(0, |format_backends| format_backends.running)
    }

    /// See [`IoBackend::event`].
    pub fn event(&self) -> BorrowedFd<'_> {
        match &self.format_backends {
            // SAFETY: the epoll stays open as long as it is borrowed.
            Some(format_backends) => unsafe {
                BorrowedFd::borrow_raw(format_backends.combined_event.0.as_raw_fd())
            },
            None => self.files.event(),
        }
    }
}
