//! The way of a snapshot's progress to its client. Cut, it ends the snapshot as if the client had gone.

use std::pin::pin;

use tokio::sync::{mpsc, oneshot};

use super::ProgressSender;
use crate::monitor::vm_error::VmError;

/// Takes the reason to cut it.
pub(super) type GiveUp = oneshot::Sender<VmError>;

/// Returns a sender whose answers reach `client` while the last value runs.
pub(super) fn way_to(client: ProgressSender) -> (ProgressSender, GiveUp, impl Future<Output = ()> + Send) {
    let (progress, mut answers) = mpsc::channel(1);
    let (give_up, given_up) = oneshot::channel::<VmError>();
    let forward = async move {
        let mut given_up = pin!(async {
            match given_up.await {
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
            reason = &mut given_up => {
                // A client that does not read sees only the end of the stream.
                let _ = client.try_send(Err(reason.into()));
            }
        }
        // Here the answers' receiver is dropped.
    };
    (progress, give_up, forward)
}

#[cfg(test)]
mod tests {
    use husk_proto::shim::v1::SnapshotProgress;
    use tokio::join;

    use super::*;

    #[tokio::test]
    async fn answers_are_passed_on_until_they_end() {
        let (client, mut read) = mpsc::channel(4);
        let (progress, give_up, forward) = way_to(client);
        let send = async {
            for _ in 0..3 {
                progress.send(Ok(SnapshotProgress::default())).await.unwrap();
            }
            drop((give_up, progress));
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
        let (progress, _give_up, forward) = way_to(client);
        drop(read);
        join!(progress.closed(), forward);

        let (client, mut read) = mpsc::channel(1);
        let (progress, give_up, forward) = way_to(client);
        give_up.send(VmError::wrong_state("it ends")).unwrap();
        join!(progress.closed(), forward);
        assert_eq!(read.recv().await.unwrap().unwrap_err().message(), "it ends");
        assert!(read.recv().await.is_none());
    }
}
