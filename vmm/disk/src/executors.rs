//! Who carries out an engine's calls: its executor those on files, the threads of an image those on its format.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::disk::Backend;
use crate::executor::{Call, Executor};
use crate::mailbox::Mailbox;
use crate::qcow2::Image;

/// All of them, as one.
#[derive(Debug)]
pub(crate) struct Executors {
    files: Box<dyn Executor>,
    /// Made for the first image that is not a plain file.
    formats: Option<Formats>,
}

/// The engine's side of images with threads of their own.
#[derive(Debug)]
struct Formats {
    mailbox: Arc<Mailbox>,
    /// Taken from the mailbox, not yet popped.
    done: VecDeque<(u16, i32)>,
    /// By place.
    images: Vec<Option<Arc<Image>>>,
    pushed: Vec<(u16, u32, Call)>,
    running: usize,
    /// Readable when the mailbox or the files' executor is.
    either: Either,
}

struct Either(Epoll);

impl std::fmt::Debug for Either {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Either")
    }
}

impl Formats {
    fn new(files: &dyn Executor) -> io::Result<Self> {
        let mailbox = Mailbox::new()?;
        let epoll = Epoll::new()?;
        for event in [files.event(), mailbox.event()] {
            epoll.ctl(
                ControlOperation::Add,
                event.as_raw_fd(),
                EpollEvent::new(EventSet::IN, 0),
            )?;
        }
        Ok(Self {
            mailbox: Arc::new(mailbox),
            done: VecDeque::new(),
            images: Vec::new(),
            pushed: Vec::new(),
            running: 0,
            either: Either(epoll),
        })
    }

    fn serves(&self, place: u32) -> bool {
        matches!(self.images.get(place as usize), Some(Some(_)))
    }

    fn submit(&mut self) -> bool {
        let any = !self.pushed.is_empty();
        for (tag, place, call) in self.pushed.drain(..) {
            if let Some(Some(image)) = self.images.get(place as usize) {
                self.running += 1;
                // SAFETY: by the contract of `Executors::push`.
                unsafe { image.start(tag, call, &self.mailbox) };
            }
        }
        any
    }
}

impl Executors {
    pub fn new(files: Box<dyn Executor>) -> Self {
        let formats = None;
        Self { files, formats }
    }

    /// See [`Executor::places`].
    pub fn places(&self) -> u32 {
        self.files.places()
    }

    /// See [`Executor::attach`]. With the first image that is not a plain file, [`Executors::event`] is another.
    pub fn attach(&mut self, place: u32, backend: &Backend) -> io::Result<()> {
        let image = match backend {
            Backend::File(file) => return self.files.attach(place, file.as_fd()),
            Backend::Qcow2(image) => Arc::clone(image),
        };
        let formats = match &mut self.formats {
            Some(formats) => formats,
            none => none.insert(Formats::new(&*self.files)?),
        };
        let index = place as usize;
        if formats.images.len() <= index {
            formats.images.resize(index + 1, None);
        }
        formats.images[index] = Some(image);
        Ok(())
    }

    /// See [`Executor::detach`].
    pub fn detach(&mut self, place: u32) -> io::Result<()> {
        match &mut self.formats {
            Some(formats) if formats.serves(place) => {
                formats.images[place as usize] = None;
                Ok(())
            }
            _ => self.files.detach(place),
        }
    }

    /// See [`Executor::push`].
    ///
    /// # Safety
    /// Likewise.
    pub unsafe fn push(&mut self, tag: u16, place: u32, call: Call) {
        match &mut self.formats {
            Some(formats) if formats.serves(place) => formats.pushed.push((tag, place, call)),
            // SAFETY: by this function's contract.
            _ => unsafe { self.files.push(tag, place, call) },
        }
    }

    /// See [`Executor::submit`].
    pub fn submit(&mut self) -> io::Result<bool> {
        let any = self.formats.as_mut().is_some_and(Formats::submit);
        Ok(self.files.submit()? || any)
    }

    /// See [`Executor::pop`].
    pub fn pop(&mut self) -> Option<(u16, i32)> {
        if let Some(formats) = &mut self.formats
            && let Some(done) = formats.mailbox.pop(&mut formats.done)
        {
            formats.running -= 1;
            return Some(done);
        }
        self.files.pop()
    }

    /// See [`Executor::running`].
    pub fn running(&self) -> usize {
        self.files.running() + self.formats.as_ref().map_or(0, |formats| formats.running)
    }

    /// See [`Executor::event`].
    pub fn event(&self) -> BorrowedFd<'_> {
        match &self.formats {
            // SAFETY: the epoll is open as long as it is borrowed.
            Some(formats) => unsafe { BorrowedFd::borrow_raw(formats.either.0.as_raw_fd()) },
            None => self.files.event(),
        }
    }
}
