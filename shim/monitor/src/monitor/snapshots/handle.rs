//! The handle to the actor of a VM's snapshots.

use husk_proto::shim::v1::SnapshotProgress;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use super::{ProgressSender, SnapshotOptions};
use crate::monitor::vm_error::VmError;

/// Answers that wait for a client.
const ANSWERS: usize = 16;

/// A handle to the actor.
#[derive(Debug, Clone)]
pub(in crate::monitor) struct SnapshotsHandle {
    mailbox: mpsc::Sender<SnapshotCommand>,
}

#[derive(Debug)]
pub(super) enum SnapshotCommand {
    Make(SnapshotOptions, ProgressSender),
    Resume(oneshot::Sender<Result<(), VmError>>),
    ResumeForShutdown(oneshot::Sender<Result<(), VmError>>),
}

impl SnapshotsHandle {
    pub(super) fn new(mailbox: mpsc::Sender<SnapshotCommand>) -> SnapshotsHandle {
        SnapshotsHandle { mailbox }
    }

    /// Makes a snapshot. Its progress and result come from the channel; dropping it ends the snapshot.
    pub(in crate::monitor) async fn make(
        &self,
        options: SnapshotOptions,
    ) -> Result<mpsc::Receiver<Result<SnapshotProgress, Status>>, VmError> {
        let (progress, answers) = mpsc::channel(ANSWERS);
        let sent = self.mailbox.send(SnapshotCommand::Make(options, progress)).await;
        sent.map_err(|_| VmError::ended())?;
        Ok(answers)
    }

    /// Lets a paused VM go on.
    ///
    /// # Errors
    /// A snapshot is being made, or one that can be restored only if the VM does not go on cannot be told.
    pub(in crate::monitor) async fn resume(&self) -> Result<(), VmError> {
        self.ask(SnapshotCommand::Resume).await
    }

    /// Lets a paused VM go on that is to end. A snapshot that is being made is given up: it would be lost at the end.
    ///
    /// # Errors
    /// A snapshot that can be restored only if the VM does not go on cannot be told.
    pub(in crate::monitor) async fn resume_for_shutdown(&self) -> Result<(), VmError> {
        self.ask(SnapshotCommand::ResumeForShutdown).await
    }

    async fn ask(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<(), VmError>>) -> SnapshotCommand,
    ) -> Result<(), VmError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.mailbox.send(command(reply)).await;
        sent.map_err(|_| VmError::ended())?;
        answer.await.map_err(|_| VmError::ended())?
    }
}
