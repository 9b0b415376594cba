//! The actor that owns the table of a VM's disks: plugs and unplugs volumes, which may be discs of CD-ROM drives, and
//! resizes disks whose files or claims have grown.
//!
//! Requests are handled one after the other, except removals: the guest may take seconds to release a disk, and longer
//! if it is paused.

mod config_lock;
mod discs;
mod lost_writes;
mod open;
mod sizes;
mod table;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::future::pending;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use husk_proto::fds::Token;
use husk_proto::shim::v1 as shim;
use husk_proto::vmm::v1::{AddDiskRequest, RemoveDiskRequest, ResizeDiskRequest};
use husk_vmi::{ClaimSize, DiskPlan, DiskSource, NewVolume, PlugPlan, ScsiAddress, VmPlan};
use husk_volumes::OpenDisk;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tracing::{info, warn};

use super::resize_watch::{POLL_INTERVAL, SizeProbe};
use super::sync::short;
use super::vm_config;
use super::vmm_connection::{VmmConnection, call_within};
use crate::monitor::vm_error::VmError;
use crate::snapshot::OpenDiskRefs;
use crate::vm_environment::VmEnvironment;
use config_lock::LockedDisks;
use lost_writes::LostWrites;
use sizes::{GrownDisks, Sizes, WatchedDisk, done};

pub(super) use config_lock::{ConfigLock, GrowthLock};
pub(super) use open::storage_hangs;
pub(super) use table::DiskTable;

/// Maximum time for the VMM to add or resize a disk.
const AT_ONCE: Duration = Duration::from_secs(30);
/// Maximum time in which the VMM drops a request that was given up.
const DROPPED_WITHIN: Duration = Duration::from_secs(1);
/// Maximum time to wait for a removal. The guest has 5 s, then its writes are flushed.
const REMOVED_WITHIN: Duration = Duration::from_secs(60);
/// The same for a paused VM, where only devices that the guest does not use can be removed.
const REMOVED_PAUSED_WITHIN: Duration = Duration::from_secs(3);

/// A handle to the actor.
#[derive(Debug, Clone)]
pub(super) struct DisksHandle {
    mailbox: mpsc::Sender<DiskCommand>,
    shown: watch::Receiver<Vec<shim::Disk>>,
}

type Reply<T> = oneshot::Sender<Result<T, VmError>>;

#[derive(Debug)]
enum DiskCommand {
    VmStarted(VmmConnection, StartedDisks),
    Add(NewVolume, Option<OwnedFd>, Reply<ScsiAddress>),
    Remove(String, Reply<RemovedDisk>),
    ForgetLostWrites(String),
    TakeLostWrites(oneshot::Sender<BTreeMap<String, String>>),
    CheckSizes(BTreeMap<String, ClaimSize>, oneshot::Sender<GrownDisks>),
    ConfigLock(Reply<LockedDisks>),
}

/// The disks of a VM that has started.
#[derive(Debug, Default)]
pub(super) struct StartedDisks {
    /// Size probes of the disks that can grow, by name.
    pub(super) probes: Vec<(String, SizeProbe)>,
    /// References to the images, by name.
    pub(super) kept: Vec<(String, OpenDiskRefs)>,
    /// Disks that were plugged before the VM was saved.
    pub(super) plugged: Vec<String>,
}

/// A volume that has been unplugged.
#[derive(Debug, Clone)]
pub(super) struct RemovedDisk {
    /// The error of the last flush: the guest's last writes may be lost. Empty if it succeeded.
    pub(super) flush_error: String,
}

impl DisksHandle {
    /// Tells the actor that the VM runs, and with which disks.
    pub(super) async fn vm_started(&self, connection: VmmConnection, disks: StartedDisks) {
        // If the actor has ended, so has the VM.
        let _ = self.mailbox.send(DiskCommand::VmStarted(connection, disks)).await;
    }

    /// Returns the disks, which stay as they are while the first result exists. Images are not extended while the second
    /// one exists.
    pub(super) async fn lock_config(&self) -> Result<LockedDisks, VmError> {
        self.ask(DiskCommand::ConfigLock).await
    }

    /// The present disks, and their changes.
    pub(super) fn watch(&self) -> watch::Receiver<Vec<shim::Disk>> {
        self.shown.clone()
    }

    /// Plugs a volume, or inserts it into the empty CD-ROM drive of its name, from its path or from the descriptor
    /// `handed`.
    pub(super) async fn add(
        &self,
        volume: NewVolume,
        handed: Option<OwnedFd>,
    ) -> Result<ScsiAddress, VmError> {
        self.ask(|reply| DiskCommand::Add(volume, handed, reply)).await
    }

    /// Checks all sizes now, and extends the images in `claims` that have grown. Returns the disks that have grown.
    pub(super) async fn check_sizes(
        &self,
        claims: BTreeMap<String, ClaimSize>,
    ) -> Result<GrownDisks, VmError> {
        let (reply, answer) = oneshot::channel();
        self.mailbox
            .send(DiskCommand::CheckSizes(claims, reply))
            .await
            .map_err(|_| VmError::ended())?;
        answer.await.map_err(|_| VmError::ended())
    }

    /// Unplugs a hotplugged volume, or ejects it if it is a disc. On a timeout the removal continues in the background.
    pub(super) async fn remove(&self, name: String, paused: bool) -> Result<RemovedDisk, VmError> {
        let (limit, why) = if paused {
            (REMOVED_PAUSED_WITHIN, "the VM is paused; it is removed at resume")
        } else {
            (
                REMOVED_WITHIN,
                "its storage does not answer, or the VM was paused; it is removed as soon as possible",
            )
        };
        let text = format!("volume {name:?} is still in use: {why}");
        let removed = self.remove_within(limit, name.clone()).await;
        if let Some(Ok(removed)) = &removed
            && !removed.flush_error.is_empty()
        {
            // The caller has the error. If the actor has ended, nobody else asks for it.
            let _ = self.mailbox.send(DiskCommand::ForgetLostWrites(name)).await;
        }
        removed.unwrap_or_else(|| Err(VmError::timed_out(text)))
    }

    /// Takes the errors of the last flushes of removed volumes that no caller of `remove` has got, by volume.
    pub(super) async fn take_lost_writes(&self) -> Result<BTreeMap<String, String>, VmError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.mailbox.send(DiskCommand::TakeLostWrites(reply)).await;
        sent.map_err(|_| VmError::ended())?;
        answer.await.map_err(|_| VmError::ended())
    }

    /// As `remove`, but returns `None` if the removal has not completed within `limit`. `take_lost_writes` returns its
    /// flush error too.
    pub(super) async fn remove_within(
        &self,
        limit: Duration,
        name: String,
    ) -> Option<Result<RemovedDisk, VmError>> {
        timeout(limit, self.ask(|reply| DiskCommand::Remove(name, reply)))
            .await
            .ok()
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> DiskCommand) -> Result<T, VmError> {
        let (reply, answer) = oneshot::channel();
        self.mailbox
            .send(command(reply))
            .await
            .map_err(|_| VmError::ended())?;
        answer.await.map_err(|_| VmError::ended())?
    }
}

#[derive(Debug)]
pub(super) struct DisksActor {
    environment: Arc<VmEnvironment>,
    mailbox: mpsc::Receiver<DiskCommand>,
    table: DiskTable,
    connection: Option<VmmConnection>,
    watched: HashMap<String, WatchedDisk>,
    /// References to the images, by name.
    kept: HashMap<String, Arc<OpenDiskRefs>>,
    held: Weak<()>,
    growth: Weak<()>,
    size_check: Option<JoinHandle<Sizes>>,
    /// Snapshots that wait for the current size check.
    hold_waiters: Vec<Reply<LockedDisks>>,
    /// Callers that wait for the current size check, and for the next one.
    size_waiters: Vec<oneshot::Sender<GrownDisks>>,
    next_waiters: Vec<oneshot::Sender<GrownDisks>>,
    /// Volumes whose storage has not answered in time when their files were opened.
    opening: HashMap<String, AbortHandle>,
    /// Callers that wait for a removal, by volume.
    waiters: HashMap<String, Vec<Reply<RemovedDisk>>>,
    removals: JoinSet<RemovalResult>,
    lost_writes: LostWrites,
}

/// The volume's name and the VMM's answer: the flush error, empty if there is none.
type RemovalResult = (String, Result<String, VmError>);

impl DisksActor {
    /// Creates the actor for the disks of a plan. The plan is kept up to date in the file `kept`.
    pub(super) fn new(
        plan: VmPlan,
        kept: PathBuf,
        environment: Arc<VmEnvironment>,
    ) -> (DisksActor, DisksHandle) {
        let (sender, mailbox) = mpsc::channel(16);
        let table = DiskTable::new(plan, kept);
        let handle = DisksHandle {
            mailbox: sender,
            shown: table.subscribe(),
        };
        let disks = DisksActor {
            environment,
            mailbox,
            table,
            size_waiters: Vec::new(),
            next_waiters: Vec::new(),
            connection: None,
            watched: HashMap::new(),
            kept: HashMap::new(),
            held: Weak::new(),
            growth: Weak::new(),
            size_check: None,
            hold_waiters: Vec::new(),
            opening: HashMap::new(),
            waiters: HashMap::new(),
            removals: JoinSet::new(),
            lost_writes: LostWrites::default(),
        };
        (disks, handle)
    }

    /// Handles requests until it is dropped.
    pub(super) async fn run(mut self) -> std::convert::Infallible {
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                command = self.mailbox.recv() => match command {
                    Some(command) => self.handle_command(command).await,
                    None => pending().await,
                },
                _ = ticks.tick(), if self.size_check.is_none() && !self.watched.is_empty() => {
                    if !self.is_held() {
                        self.check_sizes();
                    }
                }
                Some(handle_removal) = self.removals.join_next() => match handle_removal {
                    Ok((name, removed)) => self.handle_removal(&name, removed),
                    Err(error) => warn!(%error, "unplugging a volume"),
                },
                sizes = done(&mut self.size_check) => {
                    self.size_check = None;
                    let grown = self.report_growth(sizes).await;
                    for reply in self.size_waiters.drain(..) {
                        let _ = reply.send(grown.clone());
                    }
                    for reply in std::mem::take(&mut self.hold_waiters) {
                        let _ = reply.send(self.lock_config());
                    }
                    if self.is_held() {
                        for reply in self.next_waiters.drain(..) {
                            let _ = reply.send(GrownDisks::DEFERRED);
                        }
                    } else if !self.next_waiters.is_empty() {
                        self.check_sizes();
                    }
                }
            }
        }
    }

    async fn handle_command(&mut self, command: DiskCommand) {
        // The request is carried out even if its caller is gone.
        match command {
            DiskCommand::VmStarted(connection, disks) => {
                self.connection = Some(connection);
                for (name, probe) in disks.probes {
                    self.table.set_bytes(&name, probe.first);
                    self.watched.insert(name, WatchedDisk::new(probe));
                }
                let kept = disks.kept.into_iter();
                self.kept.extend(kept.map(|(name, kept)| (name, Arc::new(kept))));
                self.table.set_plugged(disks.plugged);
            }
            // The check under way may extend an image.
            DiskCommand::ConfigLock(reply) if self.size_check.is_some() => self.hold_waiters.push(reply),
            DiskCommand::ConfigLock(reply) => drop(reply.send(self.lock_config())),
            DiskCommand::CheckSizes(claims, reply) if self.is_held() => {
                self.set_claims(&claims);
                let _ = reply.send(GrownDisks::DEFERRED);
            }
            DiskCommand::Add(volume, handed, reply) => drop(reply.send(self.add(volume, handed).await)),
            DiskCommand::Remove(name, reply) => self.remove(name, reply),
            DiskCommand::ForgetLostWrites(name) => self.lost_writes.forget(&name),
            DiskCommand::TakeLostWrites(reply) => drop(reply.send(self.lost_writes.take())),
            DiskCommand::CheckSizes(claims, reply) => {
                self.set_claims(&claims);
                // Drop requests whose caller has timed out.
                self.next_waiters.retain(|reply| !reply.is_closed());
                self.next_waiters.push(reply);
                if self.size_check.is_none() {
                    self.check_sizes();
                }
            }
        }
    }

    /// The connection to the VMM, if disks may be added and removed.
    fn connection(&self) -> Result<VmmConnection, VmError> {
        if self.is_held() {
            return Err(VmError::being_saved());
        }
        let connection = self.connection.clone();
        connection.ok_or_else(VmError::not_running)
    }

    async fn add(&mut self, mut volume: NewVolume, handed: Option<OwnedFd>) -> Result<ScsiAddress, VmError> {
        let mut connection = self.connection()?;
        if let DiskSource::File(path) = &mut volume.source {
            *path = self.environment.paths.host_path(path);
        }
        if self.waiters.contains_key(&volume.name) {
            let text = format!("volume {:?} is being removed", volume.name);
            return Err(VmError::wrong_state(text));
        }
        let mut disk = match self.table.plug(&volume)? {
            PlugPlan::Present(disk) => return address(&disk),
            PlugPlan::Disc(drive) => return self.insert(*drive, handed).await,
            PlugPlan::New(disk) => disk,
        };
        let (open, probe) = self.open(&disk, handed).await?;
        let kept = OpenDiskRefs::of(&open);
        let address = match connection.add(&disk, &open).await {
            Ok(address) => address,
            Err(error) => {
                if matches!(error, VmError::TimedOut(_)) {
                    self.undo_add(disk.name.clone(), |name| unplug(connection, name));
                }
                return Err(error);
            }
        };
        disk.assign(address);
        info!(volume = disk.name, target = disk.target, "volume added");
        let name = disk.name.clone();
        self.table.add(*disk);
        self.keep(&name, kept);
        match probe {
            Ok(Some(probe)) => {
                self.table.set_bytes(&name, probe.first);
                self.watched.insert(name, WatchedDisk::new(probe));
            }
            Ok(None) => {}
            Err(error) => warn!(volume = name, %error, "the size of the volume cannot be watched"),
        }
        Ok(address)
    }

    /// Starts a removal, or adds the caller to the waiters of the one under way.
    fn remove(&mut self, name: String, reply: Reply<RemovedDisk>) {
        let connection = match self
            .connection()
            .and_then(|connection| self.table.check_plugged(&name).map(|()| connection))
        {
            Ok(connection) => connection,
            Err(status) => return drop(reply.send(Err(status))),
        };
        match self.waiters.entry(name) {
            Entry::Occupied(mut others) => {
                // Drop requests whose caller has timed out.
                others.get_mut().retain(|reply| !reply.is_closed());
                others.get_mut().push(reply);
            }
            Entry::Vacant(first) => {
                let name = first.key().clone();
                self.table.set_removing(&name, true);
                if self.table.drive(&name).is_some() {
                    self.removals.spawn(discs::eject(connection, name));
                } else {
                    self.removals.spawn(unplug(connection, name));
                }
                first.insert(vec![reply]);
            }
        }
    }

    /// Removes a volume whose addition was given up. The VMM drops the request, but its controller may have the disk
    /// already.
    fn undo_add<F>(&mut self, name: String, remove: impl FnOnce(String) -> F + Send + 'static)
    where
        F: Future<Output = RemovalResult> + Send,
    {
        // A new request for the name is refused until it ends: it would remove that disk.
        self.waiters.insert(name.clone(), Vec::new());
        self.removals.spawn(async move {
            sleep(DROPPED_WITHIN).await;
            remove(name).await
        });
    }

    /// Handles the end of a removal.
    fn handle_removal(&mut self, name: &str, removed: Result<String, VmError>) {
        let removed = removed.map(|flush_error| {
            let flush_error = short(&flush_error);
            if !flush_error.is_empty() {
                warn!(volume = name, flush_error, "the last writes may be lost");
                self.lost_writes.add(name, &flush_error);
            }
            info!(volume = name, "volume removed");
            self.watched.remove(name);
            self.kept.remove(name);
            self.table.remove(name);
            RemovedDisk { flush_error }
        });
        if removed.is_err() {
            self.table.set_removing(name, false);
        }
        // Callers that no longer wait have got a timeout error.
        for reply in self.waiters.remove(name).unwrap_or_default() {
            let _ = reply.send(removed.clone());
        }
    }
}

async fn unplug(mut connection: VmmConnection, name: String) -> RemovalResult {
    let removed = match connection.remove(&name).await {
        // The VMM does not have the device: it is removed.
        Err(VmError::NotFound(_)) => Ok(String::new()),
        removed => removed,
    };
    (name, removed)
}

fn address(disk: &DiskPlan) -> Result<ScsiAddress, VmError> {
    disk.scsi_address()
        .ok_or_else(|| VmError::internal("a volume that was added is not a SCSI disk"))
}

impl VmmConnection {
    /// Sends the descriptor of a volume.
    async fn send(&self, descriptor: Option<(Token, BorrowedFd<'_>)>) -> Result<(), VmError> {
        let Some((token, fd)) = descriptor else {
            return Ok(());
        };
        let sent = self.fds.send(&[(token, fd)]).await;
        sent.map_err(|error| VmError::unavailable(error.to_string()))
    }

    /// Adds a disk. Returns the address that the VMM gave it.
    async fn add(&mut self, disk: &DiskPlan, open: &OpenDisk) -> Result<ScsiAddress, VmError> {
        let (disk, descriptor) = vm_config::plugged(disk, open);
        self.send(descriptor).await?;
        let request = AddDiskRequest { disk: Some(disk) };
        let added = call_within(AT_ONCE, self.client.add_disk(request)).await?;
        let address = added.into_inner().address.and_then(|address| {
            Some(ScsiAddress {
                target: address.target.try_into().ok()?,
                lun: address.lun.try_into().ok()?,
            })
        });
        address.ok_or_else(|| VmError::internal("the VMM gave the disk no address"))
    }

    /// Removes a disk. Returns the flush error, empty if there is none.
    async fn remove(&mut self, name: &str) -> Result<String, VmError> {
        let request = RemoveDiskRequest { id: name.to_owned() };
        let removed = self.client.remove_disk(request).await;
        Ok(removed.map_err(VmError::from)?.into_inner().flush_error)
    }

    async fn resize(&mut self, name: &str) -> Result<u64, VmError> {
        let request = ResizeDiskRequest { id: name.to_owned() };
        Ok(call_within(AT_ONCE, self.client.resize_disk(request))
            .await?
            .into_inner()
            .bytes)
    }
}
