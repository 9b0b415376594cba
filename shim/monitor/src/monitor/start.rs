//! Starting a VM from its plan.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use husk_network::{MacAddr, NetworkError};
use husk_proto::fds::{SendError, Token};
use husk_proto::vmm::v1::event::{Event as Kind, Exit};
use husk_proto::vmm::v1::{BootRequest, CreateRequest, DiskFault, Event, ExitReason, SavedMachine};
use husk_vmi::{DeviceType, DiskSource, VmPlan};
use husk_volumes::{VolumeError, Volumes};
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::{Code, Status};
use tracing::warn;

use super::disks::StartedDisks;
use super::error_chain::error_chain;
use super::final_status::FinalStatus;
use super::interfaces::{self, VmNetworkError};
use super::replug::Replug;
use super::resize_watch::SizeProbe;
use super::status::StatusPublisher;
use super::vm_config::{GuestSockets, HostDevices, PreparedConfig};
use super::vmm_connection::VmmConnection;
use super::vmm_events::VmmEvents;
use super::vsock::vhost::{self, VhostVsockError};
use crate::kvm::{self, KvmError};
use crate::launch::{RestoreOptions, StartMode};
use crate::program::Program;
use crate::snapshot::{
    ConsumedSnapshot, MEMORY, OpenDiskRefs, OpenSnapshot, STATE, SnapshotError, adapt_copied_disk,
};
use crate::vm_environment::VmEnvironment;
use crate::vmm_process::{SpawnError, VmmProcess};

/// Maximum time for the VMM to answer the first call.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time for a VMM whose connection broke to exit. Its exit status holds the cause.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time to wait for the exit of a VMM that reported an error. A failed boot makes it exit; other errors do not.
const EXIT_AFTER_ANSWER_TIMEOUT: Duration = Duration::from_millis(300);
/// Maximum time to record that a snapshot was not used.
const UNMARK_TIMEOUT: Duration = Duration::from_secs(10);

/// An error that prevents the start of a VM.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error("opening the volumes was interrupted")]
    VolumesAborted,
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Network(#[from] VmNetworkError),
    /// A tap without a network.
    #[error(transparent)]
    Tap(#[from] NetworkError),
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error(transparent)]
    VhostVsock(#[from] VhostVsockError),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    #[error("handing files to the VMM failed")]
    Send(#[from] SendError),
    /// The VMM reported an error or died.
    #[error("{message}")]
    Vmm {
        reason: &'static str,
        message: String,
        exit: ExitReason,
    },
}

impl From<StartError> for FinalStatus {
    fn from(error: StartError) -> FinalStatus {
        match error {
            StartError::Vmm {
                reason,
                message,
                exit,
            } => FinalStatus::not_started(reason, message, exit),
            other => FinalStatus::not_started("StartFailed", error_chain(&other), ExitReason::Unspecified),
        }
    }
}

/// A VM that has booted.
#[derive(Debug)]
pub(super) struct StartedVm {
    pub(super) vmm: VmmProcess,
    pub(super) events: VmmEvents,
    pub(super) disks: StartedDisks,
}

/// Opens the plan's files, prepares its network, starts a VMM, builds the machine and boots it, or resumes it from a
/// snapshot, with other NICs if that is wanted. If the future is dropped, the VMM is killed.
pub(super) async fn start(
    plan: Arc<VmPlan>,
    environment: Arc<VmEnvironment>,
    restore: Option<RestoreOptions>,
    interfaces: &interfaces::InterfacesHandle,
    sockets: GuestSockets,
    publisher: &StatusPublisher,
    start_mode: &mut StartMode,
) -> Result<StartedVm, StartError> {
    let program = Program::vmm().map_err(SpawnError::from)?;
    let devices = HostDevices {
        kvm: kvm::open()?,
        vhost_vsock: plan.vhost_vsock_cid.map(vhost::open).transpose()?,
    };
    let (directory, replugs, plugged_disks) = match restore {
        Some(restore) => (
            Some(restore.directory),
            restore.replug_nics,
            restore.plugged_disks,
        ),
        None => (None, false, Vec::new()),
    };
    let saved = open_snapshot(directory, &plan).await?;
    let mut plugged = saved.as_ref().map(OpenSnapshot::interfaces).unwrap_or_default();
    if replugs {
        // Those of the plan have other addresses already.
        plugged
            .iter_mut()
            .for_each(|interface| interface.mac = MacAddr::random());
    }
    let (volumes, nics) = tokio::try_join!(
        open_volumes(plan.clone(), environment.clone(), saved.as_ref(), publisher),
        async { Ok(interfaces.prepare(plugged).await?) }
    )?;
    let (nics, replug) = match &saved {
        Some(saved) if replugs => {
            let (stand_ins, replug) = Replug::instead_of(nics, saved).await?;
            (stand_ins, Some(replug))
        }
        _ => (nics, None),
    };
    let paths = paths(&plan, &volumes);
    let disks = StartedDisks {
        probes: probes(&plan, &volumes),
        kept: kept(&plan, &volumes),
        plugged: plugged_disks,
    };
    let directory = saved.as_ref().map(|saved| saved.dir.path().to_owned());
    let mut vmm = VmmProcess::spawn(&program, &environment.placement)?;
    publisher.vmm_started();
    let prepared = PreparedConfig::new(&plan, volumes, nics, devices, sockets);
    let paused = plan.start_paused;
    match create_and_boot(&mut vmm, prepared, saved, replug, paused, start_mode).await {
        Ok(events) => Ok(StartedVm { vmm, events, disks }),
        Err(failure) => match failure.volume_error(&paths) {
            Some(error) => Err(error.into()),
            None => Err(failure
                .naming_files(directory.as_deref())
                .into_start_error(&mut vmm, &program)
                .await),
        },
    }
}

/// Paths of the disk images, by disk. The VMM does not know them.
fn paths(plan: &VmPlan, volumes: &Volumes) -> HashMap<String, PathBuf> {
    let disks = plan.disks.iter().zip(&volumes.disks);
    disks
        .map(|(plan, open)| (plan.name.clone(), open.path.clone()))
        .collect()
}

/// Size probes of the disks whose files other processes can reach. Copies and overlays have none.
fn probes(plan: &VmPlan, volumes: &Volumes) -> Vec<(String, SizeProbe)> {
    let disks = plan.disks.iter().zip(&volumes.disks);
    let grow = disks.filter(|(plan, open)| {
        let reached = matches!(plan.source, DiskSource::File(_) | DiskSource::HostDisk { .. });
        reached && !open.private && plan.device == DeviceType::Disk
    });
    grow.filter_map(|(plan, open)| Some((plan.name.clone(), SizeProbe::of(open.file.as_ref()?).ok()?)))
        .collect()
}

/// References to the images of all disks, for snapshots.
fn kept(plan: &VmPlan, volumes: &Volumes) -> Vec<(String, OpenDiskRefs)> {
    let disks = plan.disks.iter().zip(&volumes.disks);
    let kept = disks.filter_map(|(plan, open)| match OpenDiskRefs::of(open) {
        Ok(kept) => Some((plan.name.clone(), kept)),
        Err(error) => {
            warn!(volume = plan.name, %error, "the volume cannot be in a snapshot");
            None
        }
    });
    kept.collect()
}

/// Opens the snapshot that the VM goes on from.
async fn open_snapshot(
    directory: Option<PathBuf>,
    plan: &VmPlan,
) -> Result<Option<OpenSnapshot>, StartError> {
    let Some(directory) = directory else {
        return Ok(None);
    };
    let opened = tokio::task::spawn_blocking(move || OpenSnapshot::open(&directory)).await;
    let saved = opened.map_err(|_| StartError::VolumesAborted)??;
    saved.check_plan(plan)?;
    Ok(Some(saved))
}

async fn open_volumes(
    plan: Arc<VmPlan>,
    environment: Arc<VmEnvironment>,
    saved: Option<&OpenSnapshot>,
    publisher: &StatusPublisher,
) -> Result<Volumes, StartError> {
    let (teller, mut told) = watch::channel(None);
    let doing = if saved.is_some() { "copying" } else { "unpacking" };
    let saved = saved.map(OpenSnapshot::volumes).transpose()?;
    let mut opening = tokio::task::spawn_blocking(move || {
        let VmEnvironment { scratch, paths, .. } = &*environment;
        let tell = |unpacking| drop(teller.send(Some(unpacking)));
        match saved {
            Some(saved) => {
                let mut volumes = husk_volumes::open_saved(&plan, saved, scratch, paths, tell)?;
                let disks = plan.disks.iter().zip(&mut volumes.disks);
                disks.for_each(|(plan, open)| adapt_copied_disk(plan.cache, open));
                Ok(volumes)
            }
            None => husk_volumes::open(&plan, scratch, paths, tell),
        }
    });
    loop {
        tokio::select! {
            opened = &mut opening => return Ok(opened.map_err(|_| StartError::VolumesAborted)??),
            Ok(()) = told.changed() => if let Some(unpacking) = &*told.borrow_and_update() {
                publisher.preparing(doing, unpacking);
            }
        }
    }
}

/// A failed exchange with the VMM.
enum VmmFailure {
    /// The VMM has not answered any call.
    NoAnswer,
    Send(SendError),
    /// The snapshot was restored meanwhile, or its VM has resumed.
    Snapshot(SnapshotError),
    /// A call failed: the reason for the status, and the error.
    Call(&'static str, Status),
}

async fn create_and_boot(
    vmm: &mut VmmProcess,
    prepared: PreparedConfig,
    saved: Option<OpenSnapshot>,
    mut replug: Option<Replug>,
    paused: bool,
    start_mode: &mut StartMode,
) -> Result<VmmEvents, VmmFailure> {
    let mut client = vmm.client();
    let events = match timeout(FIRST_ANSWER_TIMEOUT, VmmEvents::subscribe(client.clone())).await {
        Ok(Ok(events)) => events,
        _ => return Err(VmmFailure::NoAnswer),
    };
    let config = prepared.send(vmm.fds()).await.map_err(VmmFailure::Send)?;
    let machine = match &saved {
        Some(saved) => Some(send_saved(vmm, saved).await.map_err(VmmFailure::Send)?),
        None => None,
    };
    let create = CreateRequest {
        config: Some(config),
        saved: machine,
    };
    client
        .create(create)
        .await
        .map_err(|e| VmmFailure::Call("StartFailed", e))?;
    let pid = vmm.pid().unwrap_or(0);
    tokio::select! {
        () = start_mode.built(pid) => {}
        _ = vmm.wait() => {
            let gone = Status::unavailable("the VMM ended before the VM was started");
            return Err(VmmFailure::Call("VmmDied", gone));
        }
    }
    let mut connection = VmmConnection {
        client: client.clone(),
        fds: vmm.fds().clone(),
    };
    if let Some(replug) = &mut replug {
        let found = replug.find_slots(&mut connection).await;
        found.map_err(|e| VmmFailure::Call("StartFailed", e))?;
    }
    let mut consumed = None;
    if let Some(saved) = saved {
        let marked = tokio::task::spawn_blocking(move || saved.consume()).await;
        consumed = marked
            .map_err(|_| VmmFailure::NoAnswer)?
            .map_err(VmmFailure::Snapshot)?;
    }
    if let Err(status) = client.boot(BootRequest { paused }).await {
        // This code says that no vCPU has run. After any other error one may have.
        if let Some(consumed) = consumed
            && status.code() == Code::FailedPrecondition
        {
            unmark(consumed).await;
        }
        return Err(VmmFailure::Call("BootFailed", status));
    }
    if let Some(replug) = replug {
        let replugged = replug.execute(connection).await;
        replugged.map_err(|e| VmmFailure::Call("StartFailed", e))?;
    }
    Ok(events)
}

/// Lets a snapshot be restored again whose guest did not run.
async fn unmark(consumed: ConsumedSnapshot) {
    let directory = consumed.path().display().to_string();
    let unmarked = tokio::task::spawn_blocking(move || consumed.unmark());
    let error = match timeout(UNMARK_TIMEOUT, unmarked).await {
        Ok(Ok(Ok(()))) => return,
        Ok(Ok(Err(error))) => error.to_string(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "its storage does not answer".to_owned(),
    };
    warn!(
        directory,
        error, "the snapshot stays marked as restored, although its guest did not run"
    );
}

/// Sends the files of a saved machine.
async fn send_saved(vmm: &VmmProcess, saved: &OpenSnapshot) -> Result<SavedMachine, SendError> {
    let (state, memory) = (Token::random(), Token::random());
    let files = [(state, saved.state.as_fd()), (memory, saved.memory.as_fd())];
    vmm.fds().send(&files).await?;
    Ok(SavedMachine {
        state: Some(state.into()),
        memory: Some(memory.into()),
    })
}

impl VmmFailure {
    /// Returns the error as one of a volume if the VMM blames a disk image.
    fn volume_error(&self, paths: &HashMap<String, PathBuf>) -> Option<VolumeError> {
        let VmmFailure::Call(_, status) = self else {
            return None;
        };
        let DiskFault { disk, reason } = DiskFault::from_status(status)?;
        let path = paths.get(&disk)?;
        Some(VolumeError::refused(&disk, path, &reason))
    }

    /// Names the files of the snapshot in this directory, which the VMM knows only by descriptor.
    fn naming_files(self, directory: Option<&Path>) -> VmmFailure {
        match (self, directory) {
            (VmmFailure::Call("StartFailed", status), Some(directory)) => {
                let message = saved_file_fault(status.message(), directory);
                VmmFailure::Call("StartFailed", Status::new(status.code(), message))
            }
            (failure, _) => failure,
        }
    }

    /// Converts the failure. The cause is in the answer of the VMM, or in the exit status of one that died.
    async fn into_start_error(self, vmm: &mut VmmProcess, program: &Program) -> StartError {
        let (reason, status) = match self {
            VmmFailure::NoAnswer => return no_answer(vmm, program).await,
            VmmFailure::Snapshot(error) => return error.into(),
            VmmFailure::Send(SendError::Io(error)) => return StartError::Send(SendError::Io(error)),
            VmmFailure::Send(error) => ("VmmFailed", Status::unavailable(error.to_string())),
            VmmFailure::Call(reason, status) => (reason, status),
        };
        let answered = !matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled);
        let limit = if answered {
            EXIT_AFTER_ANSWER_TIMEOUT
        } else {
            EXIT_TIMEOUT
        };
        let exit = timeout(limit, vmm.wait()).await.ok().and_then(Result::ok);
        match exit {
            Some(exit) if !answered => {
                let final_status = FinalStatus::of_vmm(&exit, None);
                StartError::Vmm {
                    reason: final_status.reason,
                    message: final_status.message,
                    exit: final_status.exit,
                }
            }
            exit => {
                let exit = exit.map_or(ExitReason::Unspecified, |exit| exit.reason);
                StartError::Vmm {
                    reason,
                    message: name_kvm_variable(status.message()),
                    exit,
                }
            }
        }
    }
}

/// The error for a program that exited or timed out before its first answer. It is probably not husk-vmm.
async fn no_answer(vmm: &mut VmmProcess, program: &Program) -> StartError {
    let exit = timeout(EXIT_TIMEOUT, vmm.wait()).await.ok().and_then(Result::ok);
    let what = match &exit {
        Some(exit) if exit.detail.is_empty() => "ended before it answered".to_owned(),
        Some(exit) => format!("ended before it answered ({})", exit.detail),
        None => "does not answer as husk-vmm does".to_owned(),
    };
    let killed = exit.is_some_and(|exit| exit.by_signal);
    StartError::Vmm {
        reason: if killed { "VmmDied" } else { "VmmFailed" },
        message: format!("{program} {what}{}", program.hint()),
        exit: ExitReason::Error,
    }
}

/// Names the file of a snapshot in an error of the VMM about it.
fn saved_file_fault(message: &str, directory: &Path) -> String {
    let fields = [("saved.state: ", STATE), ("saved.memory: ", MEMORY)];
    let fault = |(field, file)| Some((file, message.strip_prefix(field)?));
    match fields.into_iter().find_map(fault) {
        Some((file, fault)) => format!("{}: {fault}", directory.join(file).display()),
        None => message.to_owned(),
    }
}

/// Names the variable HUSK_KVM in an error about the KVM device. The VMM knows the device only by descriptor.
fn name_kvm_variable(message: &str) -> String {
    match (message.strip_prefix("config.kvm: "), kvm::chosen()) {
        (Some(fault), Some(path)) => format!(
            "HUSK_KVM={}: {fault}: set it to a KVM device, or leave it out",
            path.display()
        ),
        _ => message.to_owned(),
    }
}

/// Returns the exit event if `event` is one.
pub(super) fn exit_event(event: &Event) -> Option<&Exit> {
    match &event.event {
        Some(Kind::Exit(exit)) => Some(exit),
        _ => None,
    }
}
