//! One call of SyncVmi, with the data of the volumes that it plugs.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use husk_proto::fds::{FdSender, Token};
use husk_proto::shim::v1::pod_client::PodClient;
use husk_proto::shim::v1::{SyncVmiRequest, SyncVmiResponse, VolumeStatus};
use tokio::task::spawn_blocking;
use tonic::Status;
use tonic::transport::Channel;

use super::attachment::{Attachment, PodsDir};
use super::pod::Pod;

/// Maximum number of volumes of one call; a shim keeps 64 descriptors that are not yet claimed. The next call has more.
const MAX_VOLUMES: usize = 32;

/// A call of SyncVmi.
#[derive(Debug)]
pub struct SyncCall {
    client: PodClient<Channel>,
    descriptors: std::path::PathBuf,
    vmi: String,
    /// The call starts the VM.
    starts: bool,
    attachments: Vec<Attachment>,
}

/// The result of a call that was made, or that waits for a volume.
#[derive(Debug)]
pub struct Synced {
    pub answer: SyncVmiResponse,
    /// Error of the data of a volume. The others were plugged.
    pub error: Option<String>,
    /// The VM was not started: data of a volume is not on the node yet.
    pub waits: bool,
}

impl SyncCall {
    /// A call for the VMI `vmi`, as JSON, that plugs `attachments`.
    pub fn new(pod: &Pod, vmi: String, starts: bool, mut attachments: Vec<Attachment>) -> SyncCall {
        attachments.truncate(MAX_VOLUMES);
        SyncCall {
            client: pod.client(),
            descriptors: pod.descriptors(),
            vmi,
            starts,
            attachments,
        }
    }

    /// Makes the call. A VM is only started when the data of all its volumes is on the node.
    pub async fn run(mut self, pods: PodsDir) -> Result<Synced, Status> {
        let attachments = std::mem::take(&mut self.attachments);
        let wanted = attachments.len();
        let (opened, error) = spawn_blocking(move || open(&pods, &attachments))
            .await
            .map_err(|error| Status::internal(error.to_string()))?;
        if self.starts && opened.len() < wanted {
            let volumes = opened.into_iter().map(|(name, _)| VolumeStatus {
                name,
                phase: "MountedToPod".to_owned(),
                ..VolumeStatus::default()
            });
            let answer = SyncVmiResponse {
                volumes: volumes.collect(),
                ..SyncVmiResponse::default()
            };
            return Ok(Synced {
                answer,
                error,
                waits: true,
            });
        }
        let mut request = SyncVmiRequest {
            vmi: self.vmi,
            ..SyncVmiRequest::default()
        };
        // The VM takes descriptors once it runs.
        if !self.starts && !opened.is_empty() {
            let (names, fds): (Vec<String>, Vec<(Token, OwnedFd)>) = opened
                .into_iter()
                .map(|(name, fd)| (name, (Token::random(), fd)))
                .unzip();
            let sender = FdSender::connect(&self.descriptors)
                .map_err(|error| Status::unavailable(format!("the shim's fds.sock: {error}")))?;
            let sent: Vec<_> = fds.iter().map(|(token, fd)| (*token, fd.as_fd())).collect();
            sender
                .send(&sent)
                .await
                .map_err(|error| Status::unavailable(error.to_string()))?;
            let tokens = fds.iter().map(|(token, _)| (*token).into());
            request.fds = names.into_iter().zip(tokens).collect::<HashMap<_, _>>();
        }
        let answer = self.client.sync_vmi(request).await?.into_inner();
        Ok(Synced {
            answer,
            error,
            waits: false,
        })
    }
}

/// Opens what is on the node. Returns an error of one of the others.
fn open(pods: &PodsDir, attachments: &[Attachment]) -> (Vec<(String, OwnedFd)>, Option<String>) {
    let (mut opened, mut failed) = (Vec::new(), None);
    for attachment in attachments {
        match pods.open(attachment) {
            Ok(Some(fd)) => opened.push((attachment.name.clone(), fd)),
            Ok(None) => {}
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    (opened, failed)
}
