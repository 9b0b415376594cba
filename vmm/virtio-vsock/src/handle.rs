//! The host's handle of a device.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Messages that may wait for a device, which takes none while it is paused.
const MAX_MESSAGES: usize = 64;

/// A message to the worker. Sockets are nonblocking.
#[derive(Debug)]
pub(crate) enum Message {
    /// A program of the host wants to connect to this port of the guest.
    Connect(u32, File),
    /// The answer to the guest's request of this number.
    Answer(u64, Option<File>),
}

/// Reason why a connection cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// The guest's driver has not started the device.
    #[error("the guest has no vsock driver yet")]
    NoDriver,
    /// Too many requests wait.
    #[error("too many vsock connections begin at once, or the VM is paused")]
    Busy,
    /// The kernel refuses to make the socket nonblocking.
    #[error("the vsock connection's socket: {0}")]
    Socket(#[from] io::Error),
}

/// The host's handle of a [`crate::Vsock`].
#[derive(Clone, Debug)]
pub struct VsockHandle {
    /// `None` while no driver has started the device. A lock, because a message must not outlive its driver.
    sender: Arc<Mutex<Option<SyncSender<Message>>>>,
    wake: Arc<EventFd>,
}

impl VsockHandle {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            sender: Arc::default(),
            wake: Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?),
        })
    }

    /// Connects a stream socket to a port of the guest. If the guest accepts, the program at the other end of the
    /// socket reads `OK PORT\n` with the port of its end; otherwise the socket is closed.
    ///
    /// # Errors
    /// See [`VsockError`]. The socket is closed.
    pub fn connect(&self, port: u32, host: OwnedFd) -> Result<(), VsockError> {
        self.send(Message::Connect(port, nonblocking(host)?))
    }

    /// Answers the guest's request `id` with a connected stream socket, or refuses it. Does nothing if the guest does
    /// not wait any more.
    ///
    /// # Errors
    /// As for [`VsockHandle::connect`].
    pub fn answer(&self, id: u64, host: Option<OwnedFd>) -> Result<(), VsockError> {
        self.send(Message::Answer(id, host.map(nonblocking).transpose()?))
    }

    fn send(&self, message: Message) -> Result<(), VsockError> {
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = sender.as_ref().ok_or(VsockError::NoDriver)?.try_send(message);
        sent.map_err(|error| match error {
            TrySendError::Full(_) => VsockError::Busy,
            TrySendError::Disconnected(_) => VsockError::NoDriver,
        })?;
        // A write fails only when the counter is about to overflow: then it is readable anyway.
        let _ = self.wake.write(1);
        Ok(())
    }

    /// Readable when there is a message.
    pub(crate) fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// A driver has started the device. Returns the messages to it.
    pub(crate) fn open(&self) -> Receiver<Message> {
        let (sender, receiver) = sync_channel(MAX_MESSAGES);
        *self.sender.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        receiver
    }

    /// The driver has reset the device.
    pub(crate) fn close(&self) {
        *self.sender.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

fn nonblocking(socket: OwnedFd) -> io::Result<File> {
    fcntl_setfl(&socket, fcntl_getfl(&socket)? | OFlags::NONBLOCK)?;
    Ok(socket.into())
}
