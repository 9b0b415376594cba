//! The actor that owns the table of a VM's disks while it runs: plugs volumes, unplugs them, and lets disks grow.
//!
//! One thing after the other, but for unplugging: the guest has seconds for it, and one that is paused takes longer.

mod table;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use husk_proto::shim::v1 as shim;
use husk_proto::vmm::v1::{AddDiskRequest, RemoveDiskRequest, ResizeDiskRequest};
use husk_vmi::{DiskPlan, DiskSource, NewVolume, PlugPlan, ScsiAddress, VmPlan};
use husk_volumes::{Fault, OpenDisk, VolumeError};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet, spawn_blocking};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::{Code, Status};
use tracing::{info, warn};

use super::ending::chain;
use super::growth::{EVERY, Probe};
use super::handle::ended;
use super::vm_config;
use super::vmm_link::{Link, plain, within};
use crate::surroundings::Surroundings;

pub(super) use table::Table;

/// How long the VMM may take to add a disk or to resize one.
const AT_ONCE: Duration = Duration::from_secs(30);
/// How long is waited for the removal of one: the guest has 5 s, and what it wrote must become stable.
const REMOVED_WITHIN: Duration = Duration::from_secs(60);
/// The same if the VM is paused: enough for what a guest that stands still need not let go of.
const REMOVED_PAUSED_WITHIN: Duration = Duration::from_secs(3);
/// Addresses to try where the guest has not let go of what was there.
const TRIES: usize = 8;

/// A handle on the actor.
#[derive(Debug, Clone)]
pub(super) struct Handle {
    mailbox: mpsc::Sender<Command>,
    shown: watch::Receiver<Vec<shim::Disk>>,
}

type Reply<T> = oneshot::Sender<Result<T, Status>>;

#[derive(Debug)]
enum Command {
    Began(Link, Vec<(String, Probe)>),
    Add(NewVolume, Option<OwnedFd>, Reply<ScsiAddress>),
    Remove(String, Reply<Removed>),
    Measure(oneshot::Sender<Vec<String>>),
}

/// A volume that was unplugged.
#[derive(Debug, Clone)]
pub(super) struct Removed {
    /// Why what the guest wrote last may not be on stable storage; empty if it is.
    pub(super) flush_error: String,
}

impl Handle {
    /// The VM runs; the sizes of these disks are to be watched.
    pub(super) async fn began(&self, link: Link, probes: Vec<(String, Probe)>) {
        // Where the actor has ended, so has the VM.
        let _ = self.mailbox.send(Command::Began(link, probes)).await;
    }

    /// What is told of the disks that there are.
    pub(super) fn watch(&self) -> watch::Receiver<Vec<shim::Disk>> {
        self.shown.clone()
    }

    /// Plugs a volume, by the path it has or by what was handed over for it.
    pub(super) async fn add(
        &self,
        volume: NewVolume,
        handed: Option<OwnedFd>,
    ) -> Result<ScsiAddress, Status> {
        self.ask(|reply| Command::Add(volume, handed, reply)).await
    }

    /// Looks at once which files have grown; the names of the disks that have now.
    pub(super) async fn measure(&self) -> Result<Vec<String>, Status> {
        let (reply, answer) = oneshot::channel();
        self.mailbox
            .send(Command::Measure(reply))
            .await
            .map_err(|_| ended())?;
        answer.await.map_err(|_| ended())
    }

    /// Unplugs a volume that was plugged. If that takes too long it goes on, and ends when it can.
    pub(super) async fn remove(&self, name: String, paused: bool) -> Result<Removed, Status> {
        let (limit, why) = if paused {
            (
                REMOVED_PAUSED_WITHIN,
                "the VM is paused, and it goes when that is resumed",
            )
        } else {
            (
                REMOVED_WITHIN,
                "its storage does not answer, or the VM was paused; it goes when it can",
            )
        };
        let text = format!("volume {name:?} is still in use: {why}");
        let removed = self.remove_within(limit, name).await;
        removed.unwrap_or_else(|| Err(Status::deadline_exceeded(text)))
    }

    /// The same; none if it goes on.
    pub(super) async fn remove_within(
        &self,
        limit: Duration,
        name: String,
    ) -> Option<Result<Removed, Status>> {
        timeout(limit, self.ask(|reply| Command::Remove(name, reply)))
            .await
            .ok()
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(command(reply)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

/// The size of a disk's file.
#[derive(Debug)]
struct Watched {
    probe: Arc<Probe>,
    /// Bytes that the VMM knows of.
    known: u64,
    /// Bytes of which the VMM did not want to know.
    refused: Option<u64>,
}

impl Watched {
    fn new(probe: Probe) -> Watched {
        Watched {
            known: probe.first,
            probe: Arc::new(probe),
            refused: None,
        }
    }
}

type Measured = Vec<(String, io::Result<u64>)>;

#[derive(Debug)]
pub(super) struct Disks {
    surroundings: Arc<Surroundings>,
    mailbox: mpsc::Receiver<Command>,
    table: Table,
    link: Option<Link>,
    watched: HashMap<String, Watched>,
    measuring: Option<JoinHandle<Measured>>,
    /// Who waits for what is being measured, and for what is measured after that.
    asked: Vec<oneshot::Sender<Vec<String>>>,
    asked_since: Vec<oneshot::Sender<Vec<String>>>,
    /// Who waits for what is being unplugged.
    waiting: HashMap<String, Vec<Reply<Removed>>>,
    unplugging: JoinSet<Unplugged>,
}

/// What the VMM says of a removal.
type Unplugged = (String, Result<String, Status>);

impl Disks {
    /// The disks of a plan, which is kept up to date in the file `kept`.
    pub(super) fn new(plan: VmPlan, kept: PathBuf, surroundings: Arc<Surroundings>) -> (Disks, Handle) {
        let (sender, mailbox) = mpsc::channel(16);
        let table = Table::new(plan, kept);
        let handle = Handle {
            mailbox: sender,
            shown: table.subscribe(),
        };
        let disks = Disks {
            surroundings,
            mailbox,
            table,
            asked: Vec::new(),
            asked_since: Vec::new(),
            link: None,
            watched: HashMap::new(),
            measuring: None,
            waiting: HashMap::new(),
            unplugging: JoinSet::new(),
        };
        (disks, handle)
    }

    /// Serves for as long as it is polled.
    pub(super) async fn serve(mut self) -> std::convert::Infallible {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                command = self.mailbox.recv() => match command {
                    Some(command) => self.obey(command).await,
                    None => pending().await,
                },
                _ = ticks.tick(), if self.measuring.is_none() && !self.watched.is_empty() => self.measure(),
                Some(unplugged) = self.unplugging.join_next() => match unplugged {
                    Ok((name, removed)) => self.unplugged(&name, removed),
                    Err(error) => warn!(%error, "unplugging a volume"),
                },
                measured = done(&mut self.measuring) => {
                    self.measuring = None;
                    let grown = self.compare(measured).await;
                    for reply in self.asked.drain(..) {
                        let _ = reply.send(grown.clone());
                    }
                    if !self.asked_since.is_empty() {
                        self.measure();
                    }
                }
            }
        }
    }

    async fn obey(&mut self, command: Command) {
        // Whoever asked may have gone; what was asked is done all the same.
        match command {
            Command::Began(link, probes) => {
                self.link = Some(link);
                for (name, probe) in probes {
                    self.table.has_bytes(&name, probe.first);
                    self.watched.insert(name, Watched::new(probe));
                }
            }
            Command::Add(volume, handed, reply) => drop(reply.send(self.add(volume, handed).await)),
            Command::Remove(name, reply) => self.remove(name, reply),
            Command::Measure(reply) => {
                // Who asks again and again has given up as often.
                self.asked_since.retain(|reply| !reply.is_closed());
                self.asked_since.push(reply);
                if self.measuring.is_none() {
                    self.measure();
                }
            }
        }
    }

    fn link(&self) -> Result<Link, Status> {
        let link = self.link.clone();
        link.ok_or_else(|| Status::failed_precondition("the VM is not running"))
    }

    async fn add(&mut self, mut volume: NewVolume, handed: Option<OwnedFd>) -> Result<ScsiAddress, Status> {
        let mut link = self.link()?;
        if let DiskSource::File(path) = &mut volume.source {
            *path = self.surroundings.paths.on_host(path);
        }
        if self.waiting.contains_key(&volume.name) {
            let text = format!("volume {:?} is being removed", volume.name);
            return Err(Status::failed_precondition(text));
        }
        let mut avoid = Vec::new();
        let mut disk = match self.table.plug(&volume, &avoid)? {
            PlugPlan::Present(disk) => return address(&disk),
            PlugPlan::New(disk) => disk,
        };
        let opened = {
            let (disk, surroundings) = (disk.clone(), self.surroundings.clone());
            spawn_blocking(move || {
                let open = husk_volumes::open_plugged(&disk, &surroundings.paths, handed.as_ref())?;
                let probe = open.file.as_ref().map(Probe::of).transpose();
                Ok::<_, VolumeError>((open, probe))
            })
        };
        let opened = opened
            .await
            .map_err(|error| Status::internal(error.to_string()))?;
        let (open, probe) = opened.map_err(|error| refusal(&error))?;
        let told = loop {
            match link.add(&disk, &open).await {
                // What was there before is still the guest's: elsewhere it is not in the way.
                Err(status) if status.code() == Code::FailedPrecondition && avoid.len() < TRIES => {
                    avoid.push(address(&disk)?);
                    match self.table.plug(&volume, &avoid)? {
                        PlugPlan::Present(there) => return address(&there),
                        PlugPlan::New(next) => disk = next,
                    }
                }
                told => break told,
            }
        };
        if let Err(status) = told {
            if status.code() == Code::DeadlineExceeded {
                // It may yet be added; then it goes again.
                let name = disk.name.clone();
                tokio::spawn(async move { timeout(REMOVED_WITHIN, link.remove(&name)).await });
            }
            return Err(status);
        }
        let address = address(&disk)?;
        info!(volume = disk.name, target = disk.target, "volume added");
        let name = disk.name.clone();
        self.table.add(*disk);
        match probe {
            Ok(Some(probe)) => {
                self.table.has_bytes(&name, probe.first);
                self.watched.insert(name, Watched::new(probe));
            }
            Ok(None) => {}
            Err(error) => warn!(volume = name, %error, "it cannot be seen whether the volume grows"),
        }
        Ok(address)
    }

    /// Begins to unplug a volume, or waits with those for whom it is.
    fn remove(&mut self, name: String, reply: Reply<Removed>) {
        let link = match self
            .link()
            .and_then(|link| self.table.is_plugged(&name).map(|()| link))
        {
            Ok(link) => link,
            Err(status) => return drop(reply.send(Err(status))),
        };
        match self.waiting.entry(name) {
            Entry::Occupied(mut others) => {
                // Who asks again and again has given up as often.
                others.get_mut().retain(|reply| !reply.is_closed());
                others.get_mut().push(reply);
            }
            Entry::Vacant(first) => {
                self.table.is_removed(first.key(), true);
                self.unplugging.spawn(unplug(link, first.key().clone()));
                first.insert(vec![reply]);
            }
        }
    }

    /// A removal has ended, one way or the other.
    fn unplugged(&mut self, name: &str, removed: Result<String, Status>) {
        let removed = removed.map(|flush_error| {
            if !flush_error.is_empty() {
                warn!(volume = name, flush_error, "what was written last may be lost");
            }
            info!(volume = name, "volume removed");
            self.watched.remove(name);
            self.table.remove(name);
            Removed { flush_error }
        });
        if removed.is_err() {
            self.table.is_removed(name, false);
        }
        // Those who no longer wait have been told that it goes on.
        for reply in self.waiting.remove(name).unwrap_or_default() {
            let _ = reply.send(removed.clone());
        }
    }

    /// Asks for all sizes, in a thread that may wait for them.
    fn measure(&mut self) {
        self.asked = std::mem::take(&mut self.asked_since);
        let probes: Vec<(String, Arc<Probe>)> = self
            .watched
            .iter()
            .map(|(name, watched)| (name.clone(), watched.probe.clone()))
            .collect();
        self.measuring = Some(spawn_blocking(move || {
            let measure = |(name, probe): (String, Arc<Probe>)| (name, probe.bytes());
            probes.into_iter().map(measure).collect()
        }));
    }

    /// Tells the VMM of the disks that have grown, and gives their names. One that shrank is left alone: the guest may
    /// still use its end.
    async fn compare(&mut self, measured: Measured) -> Vec<String> {
        let mut grown = Vec::new();
        let Some(mut link) = self.link.clone() else {
            return grown;
        };
        for (name, bytes) in measured {
            let (Some(watched), Ok(bytes)) = (self.watched.get_mut(&name), bytes) else {
                continue;
            };
            if bytes <= watched.known {
                continue;
            }
            match link.resize(&name).await {
                Ok(shown) => {
                    info!(
                        disk = name,
                        before = watched.known,
                        bytes = shown,
                        "the disk has grown"
                    );
                    (watched.known, watched.refused) = (bytes, None);
                    self.table.has_bytes(&name, shown);
                    grown.push(name);
                }
                Err(status) if watched.refused != Some(bytes) => {
                    warn!(
                        disk = name,
                        bytes,
                        message = status.message(),
                        "the disk has grown, but not for the guest"
                    );
                    watched.refused = Some(bytes);
                }
                Err(_) => {}
            }
        }
        grown
    }
}

/// A path that the pod was not given is somebody's mistake, or worse; anything else may be well later.
fn refusal(error: &VolumeError) -> Status {
    let code = match error.fault {
        Fault::NotGiven(_) => Code::PermissionDenied,
        _ => Code::FailedPrecondition,
    };
    Status::new(code, chain(error))
}

async fn unplug(mut link: Link, name: String) -> Unplugged {
    let removed = match link.remove(&name).await {
        // What the VMM does not have is gone.
        Err(status) if status.code() == Code::NotFound => Ok(String::new()),
        removed => removed,
    };
    (name, removed)
}

/// What was measured; forever waiting if nothing is.
async fn done(measuring: &mut Option<JoinHandle<Measured>>) -> Measured {
    match measuring {
        Some(measuring) => measuring.await.unwrap_or_default(),
        None => pending().await,
    }
}

fn address(disk: &DiskPlan) -> Result<ScsiAddress, Status> {
    disk.scsi_address()
        .ok_or_else(|| Status::internal("a volume that was added is no SCSI disk"))
}

impl Link {
    async fn add(&mut self, disk: &DiskPlan, open: &OpenDisk) -> Result<(), Status> {
        let (disk, descriptor) = vm_config::plugged(disk, address(disk)?, open);
        if let Some((token, fd)) = descriptor {
            let sent = self.fds.send(&[(token, fd)]).await;
            sent.map_err(|error| Status::unavailable(error.to_string()))?;
        }
        let request = AddDiskRequest { disk: Some(disk) };
        within(AT_ONCE, self.client.add_disk(request)).await?;
        Ok(())
    }

    /// Returns why what was written last may be lost, else nothing.
    async fn remove(&mut self, name: &str) -> Result<String, Status> {
        let request = RemoveDiskRequest { id: name.to_owned() };
        let removed = self.client.remove_disk(request).await;
        Ok(removed.map_err(plain)?.into_inner().flush_error)
    }

    async fn resize(&mut self, name: &str) -> Result<u64, Status> {
        let request = ResizeDiskRequest { id: name.to_owned() };
        Ok(within(AT_ONCE, self.client.resize_disk(request))
            .await?
            .into_inner()
            .bytes)
    }
}
