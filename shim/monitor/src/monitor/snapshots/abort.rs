//! A channel for a snapshot's progress that can be aborted. Aborting it ends the snapshot, as if the client had
//! disconnected. A client that does not read does not hold it up.

use std::pin::pin;
use std::time::Duration;

use husk_proto::shim::v1::SnapshotProgress;
use husk_proto::shim::v1::snapshot_progress::Progress;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tonic::Status;
use tracing::warn;

use super::ProgressSender;
use crate::monitor::vm_error::VmError;

/// Maximum time for the client to make room for the last answer.
const READ_WITHIN: Duration = Duration::from_secs(5);

/// Aborts the channel with an error for the client.
pub(super) type AbortSender = oneshot::Sender<VmError>;

/// Returns a sender, the means to abort it, and a future that forwards what is sent to `client`.
pub(super) fn abortable_progress(
    client: ProgressSender,
) -> (ProgressSender, AbortSender, impl Future<Output = ()> + Send) {
    let (progress, mut answers) = mpsc::channel(1);
    let (abort, aborted) = oneshot::channel::<VmError>();
    let forward = async move {
        let mut aborted = pin!(async {
            match aborted.await {
                Ok(reason) => reason,
                Err(_) => std::future::pending().await,
            }
        });
        let forward = async {
            while let Some(answer) = answers.recv().await {
                if !pass_on(&client, answer).await {
                    return;
                }
            }
        };
        tokio::select! {
            () = forward => {}
            () = client.closed() => {}
            reason = &mut aborted => {
                // A client that does not read sees only the end of the stream.
                let _ = client.try_send(Err(reason.into()));
            }
        }
        // Here the answers' receiver is dropped.
    };
    (progress, abort, forward)
}

/// Passes an answer on. Returns false if the client takes no more.
async fn pass_on(client: &ProgressSender, answer: Result<SnapshotProgress, Status>) -> bool {
    let is_last = match &answer {
        Ok(progress) => matches!(progress.progress, Some(Progress::Done(_))),
        Err(_) => true,
    };
    if !is_last {
        // A client that does not read misses steps.
        return !matches!(client.try_send(answer), Err(TrySendError::Closed(_)));
    }
    match timeout(READ_WITHIN, client.send(answer)).await {
        Ok(sent) => sent.is_ok(),
        Err(_) => {
            warn!("the client does not read what became of its snapshot");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use husk_proto::shim::v1::{SnapshotDone, SnapshotStep};
    use tokio::join;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn answers_are_passed_on_until_they_end() {
        let (client, mut read) = mpsc::channel(4);
        let (progress, abort, forward) = abortable_progress(client);
        let send = async {
            for _ in 0..3 {
                progress.send(Ok(SnapshotProgress::default())).await.unwrap();
            }
            drop((abort, progress));
        };
        join!(send, forward);
        for _ in 0..3 {
            read.recv().await.unwrap().unwrap();
        }
        assert!(read.recv().await.is_none());
    }

    #[tokio::test]
    async fn a_client_that_has_gone_or_is_told_why_ends_the_snapshot() {
        let (client, read) = mpsc::channel(4);
        let (progress, _give_up, forward) = abortable_progress(client);
        drop(read);
        join!(progress.closed(), forward);

        let (client, mut read) = mpsc::channel(1);
        let (progress, abort, forward) = abortable_progress(client);
        abort.send(VmError::wrong_state("it ends")).unwrap();
        join!(progress.closed(), forward);
        assert_eq!(read.recv().await.unwrap().unwrap_err().message(), "it ends");
        assert!(read.recv().await.is_none());
    }
    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_holds_nobody_up() {
        let (client, mut read) = mpsc::channel(1);
        let (progress, _abort, forward) = abortable_progress(client);
        let begin = Instant::now();
        let send = async {
            for _ in 0..9 {
                let step = Progress::Step(SnapshotStep::default());
                progress
                    .send(Ok(SnapshotProgress { progress: Some(step) }))
                    .await
                    .unwrap();
            }
            assert_eq!(begin.elapsed(), Duration::ZERO);
            let done = Progress::Done(SnapshotDone::default());
            progress
                .send(Ok(SnapshotProgress { progress: Some(done) }))
                .await
                .unwrap();
            progress.closed().await;
        };
        let both = async { join!(send, forward) };
        timeout(READ_WITHIN * 2, both).await.unwrap();
        assert_eq!(begin.elapsed(), READ_WITHIN);
        // It has the first step.
        read.recv().await.unwrap().unwrap();
        assert!(read.recv().await.is_none());
    }
}
