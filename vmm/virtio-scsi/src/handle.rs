//! The host's end of a controller, and the actor's mailbox.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll};

use husk_devices::virtio::ActiveQueue;
use husk_disk::Disk;
use tokio::sync::oneshot;
use vmm_sys_util::eventfd::EventFd;

use crate::target::{DeviceKind, InvalidLimits};
use crate::virtqueues::Driver;
use crate::{NewUnit, UnitAddress};

/// Why the controller did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ScsiError {
    /// No such target.
    #[error("there is no target {0}, the last is {1}")]
    Target(u8, u8),
    /// Another unit is there.
    #[error("disk {1:?} is at {0}")]
    Occupied(UnitAddress, String),
    /// The driver was told that the unit there is gone, and has not acted on it: what it still has for the old disk it
    /// would send to the new one. Worth another try, there or elsewhere.
    #[error("the guest has not let go of the disk that was at {0}")]
    NotReleased(UnitAddress),
    /// A unit of that name exists elsewhere.
    #[error("disk {0:?} is at {1} already")]
    Elsewhere(String, UnitAddress),
    /// No unit of that name.
    #[error("there is no disk {0:?}")]
    NotFound(String),
    /// It is being removed.
    #[error("disk {0:?} is being removed")]
    Removing(String),
    /// The medium is none for a unit of its kind.
    #[error("disk {0:?}: {1}")]
    Medium(String, InvalidLimits),
    /// It is no CD-ROM drive.
    #[error("disk {0:?} is no CD-ROM drive")]
    NotADrive(String),
    /// The guest prevents it.
    #[error("the guest prevents removal of the medium of {0:?}")]
    Prevented(String),
    /// The engine or the host.
    #[error("disk {0:?}: {1}")]
    Io(String, io::Error),
    /// The controller has ended.
    #[error("the SCSI controller has ended")]
    Gone,
}

/// A unit that was removed.
#[derive(Debug)]
pub struct RemovedUnit {
    /// What was in it; its descriptor is closed when this is dropped, which may take time on some file systems.
    pub disk: Option<Disk>,
    /// Whether all that was written is on stable storage.
    pub flushed: io::Result<()>,
}

/// A unit as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitInfo {
    /// Name.
    pub id: String,
    /// Where.
    pub address: UnitAddress,
    /// What.
    pub kind: DeviceKind,
    /// Size of its medium in bytes, if there is one.
    pub bytes: Option<u64>,
    /// Nothing can be changed.
    pub read_only: bool,
    /// It is being removed.
    pub removing: bool,
}

/// The sending end of an answer.
pub(crate) type ReplySender<T> = oneshot::Sender<T>;

/// The same, for who must not be waited for in an async context.
pub(crate) type AckSender<T> = mpsc::SyncSender<T>;

/// What the actor is asked.
#[derive(Debug)]
pub(crate) enum ControllerMessage {
    Activate(Box<Driver>, AckSender<()>),
    Quiesce(AckSender<Vec<ActiveQueue>>),
    Reset(AckSender<()>),
    Add(Box<NewUnit>, ReplySender<Result<(), ScsiError>>),
    Remove(String, ReplySender<Result<RemovedUnit, ScsiError>>),
    Find(String, ReplySender<Result<Disk, ScsiError>>),
    Resized(String, ReplySender<Result<u64, ScsiError>>),
    Insert(String, Disk, ReplySender<Result<(), ScsiError>>),
    Eject(String, bool, ReplySender<Result<Option<Disk>, ScsiError>>),
    List(ReplySender<Result<Vec<UnitInfo>, ScsiError>>),
}

/// The actor's mailbox.
#[derive(Clone, Debug)]
pub(crate) struct Mailbox {
    messages: mpsc::Sender<ControllerMessage>,
    wakeup: Arc<EventFd>,
}

impl Mailbox {
    pub fn new(wakeup: EventFd) -> (Self, mpsc::Receiver<ControllerMessage>) {
        let (messages, received) = mpsc::channel();
        let wakeup = Arc::new(wakeup);
        (Self { messages, wakeup }, received)
    }

    pub fn send(&self, message: ControllerMessage) {
        // If there is no actor, the message's reply is dropped, and so answered.
        if self.messages.send(message).is_ok() {
            // Fails only when the counter is about to overflow: then it is readable anyway.
            let _ = self.wakeup.write(1);
        }
    }
}

/// An answer to come. A future; threads can [`wait`](ReplyFuture::wait).
#[derive(Debug)]
#[must_use]
pub struct ReplyFuture<T>(oneshot::Receiver<Result<T, ScsiError>>);

impl<T> ReplyFuture<T> {
    /// Waits for the answer.
    ///
    /// # Errors
    /// As the request's.
    ///
    /// # Panics
    /// In an async context.
    pub fn wait(self) -> Result<T, ScsiError> {
        self.0.blocking_recv().unwrap_or(Err(ScsiError::Gone))
    }
}

impl<T> Future for ReplyFuture<T> {
    type Output = Result<T, ScsiError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0)
            .poll(context)
            .map(|answer| answer.unwrap_or(Err(ScsiError::Gone)))
    }
}

/// The host's end of a [`VirtioScsi`](crate::VirtioScsi) controller. Usable from any thread, whatever state the device is in.
#[derive(Clone, Debug)]
pub struct ScsiHandle(pub(crate) Mailbox);

impl ScsiHandle {
    fn ask<T>(
        &self,
        message: impl FnOnce(ReplySender<Result<T, ScsiError>>) -> ControllerMessage,
    ) -> ReplyFuture<T> {
        let (reply, answer) = oneshot::channel();
        self.0.send(message(reply));
        ReplyFuture(answer)
    }

    /// Adds a unit and tells the driver. One of the same name at the same address is that unit already.
    pub fn add(&self, unit: NewUnit) -> ReplyFuture<()> {
        self.ask(|reply| ControllerMessage::Add(Box::new(unit), reply))
    }

    /// Removes a unit: tells the driver, goes on serving it until the driver has flushed it for the last time or 5 s
    /// have passed, ends what is under way, and makes it stable. A read-only unit, or one that no driver can be told
    /// of, goes soon. While the machine is paused nothing goes that can be written.
    pub fn remove(&self, id: &str) -> ReplyFuture<RemovedUnit> {
        self.ask(|reply| ControllerMessage::Remove(id.to_owned(), reply))
    }

    /// Takes over the size that a disk's image has now and tells the driver. Returns the size shown, in bytes. Asks the
    /// file system, for which it may wait: not for async contexts.
    ///
    /// # Errors
    /// No such unit, or as [`Disk::refresh`]; then nothing changes.
    pub fn resize(&self, id: &str) -> Result<u64, ScsiError> {
        let disk = self
            .ask(|reply| ControllerMessage::Find(id.to_owned(), reply))
            .wait()?;
        disk.refresh()
            .map_err(|error| ScsiError::Io(id.to_owned(), error))?;
        self.ask(|reply| ControllerMessage::Resized(id.to_owned(), reply))
            .wait()
    }

    /// Puts a disc into a drive, in place of any other.
    pub fn insert(&self, id: &str, disc: Disk) -> ReplyFuture<()> {
        self.ask(|reply| ControllerMessage::Insert(id.to_owned(), disc, reply))
    }

    /// Opens a drive and takes the disc out, if there is one. Where the guest prevents that, and `force` is not set, it
    /// is asked to allow it, so it is worth trying again.
    pub fn eject(&self, id: &str, force: bool) -> ReplyFuture<Option<Disk>> {
        self.ask(|reply| ControllerMessage::Eject(id.to_owned(), force, reply))
    }

    /// All units, by address.
    pub fn list(&self) -> ReplyFuture<Vec<UnitInfo>> {
        self.ask(ControllerMessage::List)
    }
}
