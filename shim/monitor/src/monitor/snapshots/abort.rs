//! A channel for a snapshot's progress that can be aborted. Aborting it ends the snapshot, as if the client had
//! disconnected.

use std::pin::pin;

use tokio::sync::{mpsc, oneshot};

use super::ProgressSender;
use crate::monitor::vm_error::VmError;

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
                if client.send(answer).await.is_err() {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use husk_proto::shim::v1::snapshot_progress::Progress;
    use husk_proto::shim::v1::{SnapshotDone, SnapshotProgress, SnapshotStep};
    use tokio::join;

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
    async fn a_client_that_reads_late_gets_the_last_answer() {
        let (client, mut read) = mpsc::channel(1);
        let (progress, _abort, forward) = abortable_progress(client);
        tokio::spawn(forward);
        let answer = |progress| {
            Ok(SnapshotProgress {
                progress: Some(progress),
            })
        };
        for _ in 0..9 {
            // As the job sends steps.
            let _ = progress.try_send(answer(Progress::Step(SnapshotStep::default())));
            tokio::task::yield_now().await;
        }
        tokio::spawn(async move {
            progress
                .send(answer(Progress::Done(SnapshotDone::default())))
                .await
        });
        tokio::time::sleep(Duration::from_secs(3600)).await;
        let mut last = None;
        while let Some(answer) = read.recv().await {
            last = answer.unwrap().progress;
        }
        assert_eq!(last, Some(Progress::Done(SnapshotDone::default())));
    }
}
