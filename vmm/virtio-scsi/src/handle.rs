//! The host's handle to a controller, and the messages to the actor.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll};

use husk_devices::component::{RestoreError, SaveError};
use husk_devices::virtio::ActiveQueue;
use husk_disk::{Disk, DiskCounters};
use tokio::sync::oneshot;
use vmm_sys_util::eventfd::EventFd;

use crate::controller::ControllerState;
use crate::target::{DeviceKind, InvalidLimits};
use crate::virtqueues::Driver;
use crate::{NewUnit, UnitAddress};

/// Error of a request to the controller.
#[derive(Debug, thiserror::Error)]
pub enum ScsiError {
    /// No such target.
    #[error("there is no target {0}, the last is {1}")]
    Target(u8, u8),
    /// Another unit is there.
    #[error("{0} is in use by disk {1:?}")]
    Occupied(UnitAddress, String),
    /// The driver has not handled the removal of the unit that was there: it could send commands for the old disk to
    /// the new one. Retry, there or at another address.
    #[error("the guest has not removed the disk that was at {0} yet; retry, or use another address")]
    NotReleased(UnitAddress),
    /// No LUN of this target is free.
    #[error("the SCSI controller is full: no LUN of target {0} is free")]
    Full(u8),
    /// A unit of that name exists elsewhere.
    #[error("disk {0:?} is already at {1}")]
    Elsewhere(String, UnitAddress),
    /// No unit of that name.
    #[error("there is no disk {0:?}")]
    NotFound(String),
    /// It is being removed.
    #[error("disk {0:?} is being removed")]
    Removing(String),
    /// The medium does not suit the kind of unit.
    #[error("disk {0:?}: {1}")]
    Medium(String, InvalidLimits),
    /// It is no CD-ROM drive.
    #[error("disk {0:?} is not a CD-ROM drive")]
    NotADrive(String),
    /// A disc is in the drive.
    #[error("the drive {0:?} has a disc")]
    Loaded(String),
    /// PREVENT ALLOW MEDIUM REMOVAL is in force.
    #[error("the guest prevents removal of the medium of {0:?}")]
    Prevented(String),
    /// Error of the engine or the host.
    #[error("disk {0:?}: {1}")]
    Io(String, io::Error),
    /// The controller has ended.
    #[error("the SCSI controller has ended")]
    Gone,
}

/// A unit that was removed.
#[derive(Debug)]
pub struct RemovedUnit {
    /// The disk in it. Dropping it closes the descriptor, which may take time on some file systems.
    pub disk: Option<Disk>,
    /// Result of the last flush.
    pub flushed: io::Result<()>,
}

/// A description of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitInfo {
    /// Name of the disk.
    pub id: String,
    /// Address on the controller.
    pub address: UnitAddress,
    /// Kind of device.
    pub kind: DeviceKind,
    /// Size of the medium in bytes, if there is one.
    pub bytes: Option<u64>,
    /// The medium cannot be written.
    pub read_only: bool,
    /// It is being removed.
    pub removing: bool,
    /// Counters of the medium's image; absent in an empty drive, and for a passthrough device.
    pub counters: Option<DiskCounters>,
}

/// Sender of a reply to an async caller.
pub(crate) type ReplySender<T> = oneshot::Sender<T>;

/// Sender of a reply to a thread that blocks on it.
pub(crate) type AckSender<T> = mpsc::SyncSender<T>;

/// A message to the actor.
#[derive(Debug)]
pub(crate) enum ControllerMessage {
    Activate(Box<Driver>, AckSender<()>),
    Quiesce(AckSender<Vec<ActiveQueue>>),
    Reset(AckSender<()>),
    Save(AckSender<Result<ControllerState, SaveError>>),
    /// With the features that the driver has accepted.
    Restore(Box<ControllerState>, u64, AckSender<Result<(), RestoreError>>),
    Add(Box<NewUnit>, ReplySender<Result<(), ScsiError>>),
    AddAtFreeLun(Box<NewUnit>, ReplySender<Result<UnitAddress, ScsiError>>),
    Remove(String, ReplySender<Result<RemovedUnit, ScsiError>>),
    Find(String, ReplySender<Result<Disk, ScsiError>>),
    Resized(String, ReplySender<Result<u64, ScsiError>>),
    Insert(String, Disk, ReplySender<Result<u64, ScsiError>>),
    Eject(String, bool, ReplySender<Result<Option<Disk>, ScsiError>>),
    List(ReplySender<Result<Vec<UnitInfo>, ScsiError>>),
}

/// Sends messages to the actor.
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
        // Without an actor the message is dropped, and with it the sender of its reply.
        if self.messages.send(message).is_ok() {
            // Fails only if the counter would overflow. Then it is readable anyway.
            let _ = self.wakeup.write(1);
        }
    }
}

/// A future reply. Threads can [`wait`](ReplyFuture::wait) for it.
#[derive(Debug)]
#[must_use]
pub struct ReplyFuture<T>(oneshot::Receiver<Result<T, ScsiError>>);

impl<T> ReplyFuture<T> {
    /// Waits for the reply.
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

/// The host's handle to a [`VirtioScsi`](crate::VirtioScsi) controller. Usable from any thread, in any state of the
/// device.
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

    /// Adds a unit and notifies the driver. Succeeds if a unit with this name exists at this address.
    pub fn add(&self, unit: NewUnit) -> ReplyFuture<()> {
        self.ask(|reply| ControllerMessage::Add(Box::new(unit), reply))
    }

    /// Adds a unit as [`ScsiHandle::add`] does, at the lowest free LUN of its address's target. Returns its address. A
    /// LUN is free if no unit has it, and the driver has acted on the removal of the unit that had it last. A unit of
    /// the same name is that unit already.
    pub fn add_at_free_lun(&self, unit: NewUnit) -> ReplyFuture<UnitAddress> {
        self.ask(|reply| ControllerMessage::AddAtFreeLun(Box::new(unit), reply))
    }

    /// Removes a unit: notifies the driver, serves the unit until the driver has flushed it for the last time or 5 s
    /// have passed, waits for running tasks, and flushes the disk. A read-only unit, or one without a driver that gets
    /// events, goes at once. While the VM is paused a writable unit stays.
    pub fn remove(&self, id: &str) -> ReplyFuture<RemovedUnit> {
        self.ask(|reply| ControllerMessage::Remove(id.to_owned(), reply))
    }

    /// Reads the size of a disk's image again and notifies the driver. Returns the new size in bytes. Blocks on the
    /// file system: not for async contexts.
    ///
    /// # Errors
    /// There is no such unit, or as [`Disk::refresh`]. Nothing changes then.
    pub fn resize(&self, id: &str) -> Result<u64, ScsiError> {
        let disk = self
            .ask(|reply| ControllerMessage::Find(id.to_owned(), reply))
            .wait()?;
        disk.refresh()
            .map_err(|error| ScsiError::Io(id.to_owned(), error))?;
        self.ask(|reply| ControllerMessage::Resized(id.to_owned(), reply))
            .wait()
    }

    /// Writes what this process holds of a disk's image to its file, as [`Disk::write_back`] does. Blocks on the file
    /// system: not for async contexts.
    ///
    /// # Errors
    /// There is no such unit, or the kernel's error.
    pub fn write_back(&self, id: &str) -> Result<(), ScsiError> {
        let disk = self.ask(|reply| ControllerMessage::Find(id.to_owned(), reply));
        let written = disk.wait()?.write_back();
        written.map_err(|error| ScsiError::Io(id.to_owned(), error))
    }

    /// Inserts a disc into an empty drive and closes its tray. Returns the size that the guest can read, in bytes.
    pub fn insert(&self, id: &str, disc: Disk) -> ReplyFuture<u64> {
        self.ask(|reply| ControllerMessage::Insert(id.to_owned(), disc, reply))
    }

    /// Opens a drive's tray and returns the disc, if there is one, after its last read. If the guest prevents the
    /// removal and `force` is not set, fails with [`ScsiError::Prevented`] and sends the guest an eject request; retry
    /// later.
    pub fn eject(&self, id: &str, force: bool) -> ReplyFuture<Option<Disk>> {
        self.ask(|reply| ControllerMessage::Eject(id.to_owned(), force, reply))
    }

    /// All units, ordered by address.
    pub fn list(&self) -> ReplyFuture<Vec<UnitInfo>> {
        self.ask(ControllerMessage::List)
    }
}
