//! The actor that makes snapshots of a VM, one at a time, and lets a paused VM go on.
//!
//! Both are one actor's, because a VM may not go on while it is saved, and a snapshot that can be restored only if its
//! VM does not go on must know when it does.

mod abort;
mod handle;
mod job;
mod once_only;

use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use husk_proto::shim::v1::SnapshotProgress;
use husk_proto::vmm::v1::ResumeRequest;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::Status;
use tracing::warn;

use super::disks::DisksHandle;
use super::handle::VMM_TIMEOUT;
use super::interfaces::InterfacesHandle;
use super::vm::RunningVmm;
use super::vm_error::VmError;
use super::vmm_connection::call_within;
use crate::snapshot::SnapshotError;
use abort::{AbortSender, abortable_progress};
use handle::SnapshotCommand;
use job::SnapshotJob;
use once_only::{OnceOnlySnapshot, OnceOnlySnapshots};

pub(super) use handle::SnapshotsHandle;

/// A snapshot to make.
#[derive(Debug, Clone)]
pub(super) struct SnapshotOptions {
    /// Its directory.
    pub(super) directory: PathBuf,
    /// The VM goes on afterwards, unless it was paused before.
    pub(super) resume: bool,
    /// It gets checksums of its files.
    pub(super) checksums: bool,
    /// Images that the guest writes are copied in full where they cannot be copied in an instant.
    pub(super) copy_disks: bool,
    /// Memory is copied while the VM runs, and then what was written meanwhile.
    pub(super) live: bool,
}

/// Takes the progress of a snapshot, and its result. Closed, it ends the snapshot.
pub(super) type ProgressSender = mpsc::Sender<Result<SnapshotProgress, Status>>;

/// The parts of a VM that a snapshot needs.
#[derive(Debug, Clone)]
pub(super) struct SnapshotSources {
    pub(super) vmm: watch::Receiver<Option<RunningVmm>>,
    pub(super) disks: DisksHandle,
    pub(super) interfaces: InterfacesHandle,
    /// The metadata of the manifest.
    pub(super) vmi: Arc<serde_json::Value>,
    /// Each job keeps a clone until its files are removed.
    pub(super) removing: RemovalGuard,
}

/// Never sends: the supervisor waits until all clones are dropped.
pub(super) type RemovalGuard = mpsc::Sender<Infallible>;

/// The snapshot that is being made. Its result: a snapshot that must know when the VM goes on.
type RunningJob = Pin<Box<dyn Future<Output = Option<OnceOnlySnapshot>> + Send>>;

pub(super) struct SnapshotsActor {
    sources: SnapshotSources,
    mailbox: mpsc::Receiver<SnapshotCommand>,
    job: Option<RunningJob>,
    abort: Option<AbortSender>,
    /// Callers that wait for the end of the snapshot, after which the VM goes on.
    resume_waiters: Vec<oneshot::Sender<Result<(), VmError>>>,
    /// Snapshots of this pause.
    once_only: OnceOnlySnapshots,
}

impl SnapshotsActor {
    pub(super) fn new(sources: SnapshotSources) -> (SnapshotsActor, SnapshotsHandle) {
        let (sender, mailbox) = mpsc::channel(16);
        let actor = SnapshotsActor {
            sources,
            mailbox,
            job: None,
            abort: None,
            resume_waiters: Vec::new(),
            once_only: OnceOnlySnapshots::default(),
        };
        (actor, SnapshotsHandle::new(sender))
    }

    /// Handles requests until it is dropped. A snapshot that is being made is removed then.
    pub(super) async fn run(mut self) -> Infallible {
        loop {
            tokio::select! {
                command = self.mailbox.recv() => match command {
                    Some(SnapshotCommand::Make(options, progress)) => self.make(options, progress).await,
                    // Its caller has given up while the actor waited for storage.
                    Some(SnapshotCommand::Resume(reply) | SnapshotCommand::ResumeForShutdown(reply))
                        if reply.is_closed() => {}
                    Some(SnapshotCommand::Resume(reply)) => drop(reply.send(self.resume().await)),
                    Some(SnapshotCommand::ResumeForShutdown(reply)) => self.resume_for_shutdown(reply).await,
                    None => std::future::pending().await,
                },
                made = finished(&mut self.job) => {
                    self.job = None;
                    self.once_only.extend(made);
                    if !self.resume_waiters.is_empty() {
                        let resumed = self.resume().await;
                        for reply in self.resume_waiters.drain(..) {
                            let _ = reply.send(resumed.clone());
                        }
                    }
                }
            }
        }
    }

    async fn make(&mut self, options: SnapshotOptions, progress: ProgressSender) {
        let refusal = if self.job.is_some() {
            VmError::wrong_state("a snapshot of the VM is being made already: wait until it is complete")
        } else if !options.directory.is_absolute() {
            VmError::invalid_argument(format!(
                "directory: {} is not an absolute path",
                options.directory.display()
            ))
        } else {
            match self.running() {
                Ok(vmm) => {
                    let (progress, abort, forward) = abortable_progress(progress);
                    let job = SnapshotJob::new(self.sources.clone(), vmm, options, progress);
                    // Ends by itself when the job has given its last answer, or is dropped.
                    tokio::spawn(forward);
                    self.abort = Some(abort);
                    self.job = Some(Box::pin(job.run()));
                    return;
                }
                Err(error) => error,
            }
        };
        let _ = progress.send(Err(refusal.into())).await;
    }

    /// Lets a paused VM go on that is to end.
    async fn resume_for_shutdown(&mut self, reply: oneshot::Sender<Result<(), VmError>>) {
        if self.job.is_none() {
            return drop(reply.send(self.resume().await));
        }
        if let Some(abort) = self.abort.take() {
            warn!("a snapshot is given up, because the VM is being shut down");
            let _ = abort.send(VmError::wrong_state(
                "the VM is being shut down, so the snapshot was given up",
            ));
        }
        self.resume_waiters.push(reply);
    }

    /// Lets a paused VM go on.
    async fn resume(&mut self) -> Result<(), VmError> {
        if self.job.is_some() {
            let text = "a snapshot of the VM is being made: resume it when that is complete";
            return Err(VmError::wrong_state(text));
        }
        let mut vmm = self.running()?;
        self.once_only.mark_resumed().await?;
        call_within(VMM_TIMEOUT, vmm.client.resume(ResumeRequest::default())).await?;
        Ok(())
    }

    fn running(&self) -> Result<RunningVmm, VmError> {
        let running = self.sources.vmm.borrow().clone();
        running.ok_or_else(VmError::not_running)
    }
}

/// Returns the result of the snapshot that is being made. Never completes if there is none.
async fn finished(job: &mut Option<RunningJob>) -> Option<OnceOnlySnapshot> {
    match job {
        Some(job) => job.await,
        None => std::future::pending().await,
    }
}

impl From<SnapshotError> for VmError {
    fn from(error: SnapshotError) -> VmError {
        VmError::wrong_state(error.to_string())
    }
}
