//! From a plan to a VM that runs.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use husk_proto::fds::SendError;
use husk_proto::vmm::v1::event::{Event as Kind, Exit};
use husk_proto::vmm::v1::{BootRequest, CreateRequest, DiskFault, Event, EventsRequest, ExitReason};
use husk_vmi::{DeviceType, DiskSource, VmPlan};
use husk_volumes::{VolumeError, Volumes};
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::{Code, Status, Streaming};

use super::ending::{Ending, chain};
use super::growth::Probe;
use super::interfaces::{self, PodError};
use super::status::Board;
use super::vm_config::Configured;
use crate::kvm::{self, KvmError};
use crate::launch::Starter;
use crate::surroundings::Surroundings;
use crate::vmm_process::{Program, SpawnError, VmmProcess};

/// How long a program that is the VMM takes to answer at the very most.
const FIRST_ANSWER: Duration = Duration::from_secs(30);
/// How long a VMM that broke off has to end, and so to say why.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long one that said why has to end by itself; a failed boot ends it, other refusals do not.
const AFTER_ANSWER: Duration = Duration::from_millis(300);

/// Why a VM did not start.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error("opening the volumes was cut short")]
    VolumesAborted,
    #[error(transparent)]
    Pod(#[from] PodError),
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    #[error("handing files to the VMM failed")]
    Send(#[from] SendError),
    /// The VMM refused, or died; this is its reason.
    #[error("{message}")]
    Vmm {
        reason: &'static str,
        message: String,
        exit: ExitReason,
    },
}

impl From<StartError> for Ending {
    fn from(error: StartError) -> Ending {
        match error {
            StartError::Vmm {
                reason,
                message,
                exit,
            } => Ending::not_started(reason, message, exit),
            other => Ending::not_started("StartFailed", chain(&other), ExitReason::Unspecified),
        }
    }
}

/// A VM that was started.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) vmm: VmmProcess,
    pub(super) events: Streaming<Event>,
    /// Of the disks that somebody may let grow, by name.
    pub(super) probes: Vec<(String, Probe)>,
}

/// Opens the plan's files, has its network prepared, starts a VMM, builds the machine and boots it. Dropped halfway, it leaves nothing running.
pub(super) async fn start(
    plan: Arc<VmPlan>,
    surroundings: Arc<Surroundings>,
    interfaces: &interfaces::Handle,
    console: Option<OwnedFd>,
    board: &Board,
    starter: &mut Starter,
) -> Result<Started, StartError> {
    let program = Program::find()?;
    let kvm = kvm::open()?;
    let (volumes, nics) = tokio::try_join!(open_volumes(plan.clone(), surroundings.clone(), board), async {
        Ok(interfaces.prepare().await?)
    })?;
    let paths = paths(&plan, &volumes);
    let probes = probes(&plan, &volumes);
    let mut vmm = VmmProcess::spawn(&program, &surroundings.place)?;
    board.vmm_started();
    let configured = Configured::new(&plan, volumes, nics, kvm, console);
    match drive(&mut vmm, configured, plan.start_paused, starter).await {
        Ok(events) => Ok(Started { vmm, events, probes }),
        Err(refusal) => match refusal.of_volume(&paths) {
            Some(error) => Err(error.into()),
            None => Err(refusal.explained(&mut vmm, &program).await),
        },
    }
}

/// What the images of disks are called, which the VMM is not told.
fn paths(plan: &VmPlan, volumes: &Volumes) -> HashMap<String, PathBuf> {
    let disks = plan.disks.iter().zip(&volumes.disks);
    disks
        .map(|(plan, open)| (plan.name.clone(), open.path.clone()))
        .collect()
}

/// Holds on the files that lie where others can reach them, and are no copies.
fn probes(plan: &VmPlan, volumes: &Volumes) -> Vec<(String, Probe)> {
    let disks = plan.disks.iter().zip(&volumes.disks);
    let grow = disks.filter(|(plan, _)| {
        let reached = matches!(plan.source, DiskSource::File(_) | DiskSource::HostDisk { .. });
        reached && !plan.overlay && plan.device == DeviceType::Disk
    });
    grow.filter_map(|(plan, open)| Some((plan.name.clone(), Probe::of(open.file.as_ref()?).ok()?)))
        .collect()
}

async fn open_volumes(
    plan: Arc<VmPlan>,
    surroundings: Arc<Surroundings>,
    board: &Board,
) -> Result<Volumes, StartError> {
    let (teller, mut told) = watch::channel(None);
    let mut opening = tokio::task::spawn_blocking(move || {
        let Surroundings { scratch, paths, .. } = &*surroundings;
        husk_volumes::open(&plan, scratch, paths, |unpacking| {
            drop(teller.send(Some(unpacking)))
        })
    });
    loop {
        tokio::select! {
            opened = &mut opening => return Ok(opened.map_err(|_| StartError::VolumesAborted)??),
            Ok(()) = told.changed() => if let Some(unpacking) = &*told.borrow_and_update() {
                board.unpacking(unpacking);
            }
        }
    }
}

/// Why a conversation with the VMM ended early.
enum Refusal {
    /// It has not answered a single call.
    Mute,
    Send(SendError),
    /// The call, and what it told.
    Call(&'static str, Status),
}

async fn drive(
    vmm: &mut VmmProcess,
    configured: Configured,
    paused: bool,
    starter: &mut Starter,
) -> Result<Streaming<Event>, Refusal> {
    let mut client = vmm.client();
    let events = match timeout(FIRST_ANSWER, client.events(EventsRequest {})).await {
        Ok(Ok(events)) => events,
        _ => return Err(Refusal::Mute),
    };
    let config = configured.send(vmm.fds()).await.map_err(Refusal::Send)?;
    let create = CreateRequest { config: Some(config) };
    client
        .create(create)
        .await
        .map_err(|e| Refusal::Call("StartFailed", e))?;
    let pid = vmm.pid().unwrap_or(0);
    tokio::select! {
        () = starter.built(pid) => {}
        _ = vmm.wait() => {
            let gone = Status::unavailable("the VMM ended before the VM was started");
            return Err(Refusal::Call("VmmDied", gone));
        }
    }
    client
        .boot(BootRequest { paused })
        .await
        .map_err(|e| Refusal::Call("BootFailed", e))?;
    Ok(events.into_inner())
}

impl Refusal {
    /// That of an image, by its name.
    fn of_volume(&self, paths: &HashMap<String, PathBuf>) -> Option<VolumeError> {
        let Refusal::Call(_, status) = self else {
            return None;
        };
        let DiskFault { disk, reason } = DiskFault::from_status(status)?;
        let path = paths.get(&disk)?;
        Some(VolumeError::refused(&disk, path, &reason))
    }

    /// A VMM that answered gave its reason; one that died left an exit status.
    async fn explained(self, vmm: &mut VmmProcess, program: &Program) -> StartError {
        let (reason, status) = match self {
            Refusal::Mute => return mute(vmm, program).await,
            Refusal::Send(SendError::Io(error)) => return StartError::Send(SendError::Io(error)),
            Refusal::Send(error) => ("VmmFailed", Status::unavailable(error.to_string())),
            Refusal::Call(reason, status) => (reason, status),
        };
        let answered = !matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled);
        let patience = if answered { AFTER_ANSWER } else { LAST_WORDS };
        let exit = timeout(patience, vmm.wait()).await.ok().and_then(Result::ok);
        match exit {
            Some(exit) if !answered => {
                let ending = Ending::of_vmm(&exit, None);
                StartError::Vmm {
                    reason: ending.reason,
                    message: ending.message,
                    exit: ending.exit,
                }
            }
            exit => {
                let exit = exit.map_or(ExitReason::Unspecified, |exit| exit.reason);
                StartError::Vmm {
                    reason,
                    message: in_the_callers_words(status.message()),
                    exit,
                }
            }
        }
    }
}

/// A program that ended, or was waited for in vain, before it answered: as likely as not it is no husk-vmm.
async fn mute(vmm: &mut VmmProcess, program: &Program) -> StartError {
    let exit = timeout(LAST_WORDS, vmm.wait()).await.ok().and_then(Result::ok);
    let what = match &exit {
        Some(exit) if exit.detail.is_empty() => "ended before it answered".to_owned(),
        Some(exit) => format!("ended before it answered ({})", exit.detail),
        None => "does not answer as husk-vmm does".to_owned(),
    };
    let killed = exit.is_some_and(|exit| exit.by_signal);
    StartError::Vmm {
        reason: if killed { "VmmDied" } else { "VmmFailed" },
        message: format!("{program} {what}{}", program.way_out()),
        exit: ExitReason::Error,
    }
}

/// The VMM knows the KVM device by its descriptor; who chose it, by a variable.
fn in_the_callers_words(message: &str) -> String {
    match (message.strip_prefix("config.kvm: "), kvm::chosen()) {
        (Some(fault), Some(path)) => format!(
            "HUSK_KVM={}: {fault}: set it to a KVM device, or leave it out",
            path.display()
        ),
        _ => message.to_owned(),
    }
}

/// The last event of a VMM, if this is it.
pub(super) fn last_event(event: &Event) -> Option<&Exit> {
    match &event.event {
        Some(Kind::Exit(exit)) => Some(exit),
        _ => None,
    }
}
