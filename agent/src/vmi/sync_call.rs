//! One call of SyncVmi, with the data of the volumes that it plugs.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use husk_proto::fds::{FdSender, Token};
use husk_proto::shim::v1::pod_client::PodClient;
use husk_proto::shim::v1::{RestartRequired, SyncVmiRequest, SyncVmiResponse};
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::Channel;

use super::attachment::{Attachment, PodsDir, VolumeData};
use super::awaited::{AwaitedVolume, VolumeOfPod};
use super::object::Vmi;
use super::pod::Pod;

/// Maximum number of volumes that one call plugs; a shim keeps 64 descriptors that are not yet claimed. The next call
/// has more.
const MAX_VOLUMES: usize = 32;
/// Maximum time to open the data of all volumes. It may be on a network file system that does not answer.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// The field of the grace period. Each shutdown says it, so that a change of it waits for no restart.
const GRACE_PERIOD: &str = "spec.terminationGracePeriodSeconds";

/// A call of SyncVmi.
#[derive(Debug)]
pub struct SyncCall {
    client: PodClient<Channel>,
    descriptors: PathBuf,
    vmi: String,
    /// The call starts the VM.
    starts: bool,
    attachments: Vec<Attachment>,
    /// The object as the watch has it.
    latest: watch::Receiver<Option<Arc<Vmi>>>,
    /// One attempt of a VMI to open volumes is under way at a time.
    opening: Arc<Semaphore>,
}

/// The result of a call that was made, or that waits for a volume.
#[derive(Debug)]
pub struct Synced {
    pub answer: SyncVmiResponse,
    /// Error of one volume. The others were plugged.
    pub error: Option<String>,
    /// The VM was not started: data of a volume is not on the node yet.
    pub waits: bool,
    /// Volumes whose attachment pod is there, but not their data.
    pub awaited: Vec<AwaitedVolume>,
    /// Volumes that are left to the next call.
    pub unseen: Vec<VolumeOfPod>,
}

/// The volumes of a call.
#[derive(Debug, Default)]
struct Opened {
    data: Vec<(Attachment, OwnedFd)>,
    awaited: Vec<AwaitedVolume>,
    /// Volumes beyond the limit.
    unseen: Vec<VolumeOfPod>,
    /// The first error.
    error: Option<String>,
}

impl SyncCall {
    /// A call for the VMI `vmi`, as JSON, that plugs `attachments`.
    pub fn new(
        pod: &Pod,
        vmi: String,
        starts: bool,
        attachments: Vec<Attachment>,
        latest: watch::Receiver<Option<Arc<Vmi>>>,
        opening: Arc<Semaphore>,
    ) -> SyncCall {
        SyncCall {
            client: pod.client(),
            descriptors: pod.descriptors(),
            vmi,
            starts,
            attachments,
            latest,
            opening,
        }
    }

    /// Makes the call. A VM is only started when the data of all its volumes is on the node.
    pub async fn run(mut self, pods: PodsDir) -> Result<Synced, Status> {
        let attachments = std::mem::take(&mut self.attachments);
        let wanted = attachments.len();
        let Opened {
            data: mut opened,
            awaited,
            unseen,
            error,
        } = self.open(pods, attachments).await?;
        if self.starts && opened.len() < wanted {
            return Ok(Synced {
                answer: SyncVmiResponse::default(),
                error,
                waits: true,
                awaited,
                unseen,
            });
        }
        let mut request = SyncVmiRequest {
            vmi: self.vmi,
            // virt-controller also brings changes to a VMI that its VM takes at the next start only.
            partial: true,
            ..SyncVmiRequest::default()
        };
        // virt-controller does not wait for the agent to take away a volume that is not Ready.
        keep_outstanding(&mut opened, self.latest.borrow().as_deref());
        // The VM takes descriptors once it runs.
        if !self.starts && !opened.is_empty() {
            let (names, fds): (Vec<String>, Vec<(Token, OwnedFd)>) = opened
                .into_iter()
                .map(|(attachment, fd)| (attachment.name, (Token::random(), fd)))
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
        let refused = answer.volumes.iter().find(|volume| {
            matches!(
                volume.reason.as_str(),
                "VolumeAttachFailed" | "VolumeDetachFailed"
            )
        });
        let refused = refused.map(|volume| format!("volume {:?}: {}", volume.name, volume.message));
        Ok(Synced {
            error: error.or(refused).or_else(|| waits_for_restart(&answer)),
            answer,
            waits: false,
            awaited,
            unseen,
        })
    }

    /// Opens the volumes whose data is there.
    async fn open(&self, pods: PodsDir, attachments: Vec<Attachment>) -> Result<Opened, Status> {
        if attachments.is_empty() {
            return Ok(Opened::default());
        }
        let late = || Status::deadline_exceeded("the data of a hotpluggable volume takes too long to open");
        let permit = Arc::clone(&self.opening)
            .try_acquire_owned()
            .map_err(|_| late())?;
        let limit = match self.starts {
            true => usize::MAX,
            false => MAX_VOLUMES,
        };
        let opened = spawn_blocking(move || {
            let _permit = permit;
            open(&pods, &attachments, limit)
        });
        timeout(OPEN_TIMEOUT, opened)
            .await
            .map_err(|_| late())?
            .map_err(|error| Status::internal(error.to_string()))
    }
}

/// Closes the data of volumes that the VMI does not have any more, or has from another attachment pod.
fn keep_outstanding(opened: &mut Vec<(Attachment, OwnedFd)>, vmi: Option<&Vmi>) {
    let present = vmi
        .map(|vmi| Attachment::outstanding(vmi, &[]))
        .unwrap_or_default();
    opened.retain(|(attachment, _)| present.contains(attachment));
}

/// The changes that the VM takes at its next start only, a line for each.
fn waits_for_restart(answer: &SyncVmiResponse) -> Option<String> {
    let others = answer
        .restart_required
        .iter()
        .filter(|change| change.field != GRACE_PERIOD);
    let lines: Vec<String> = others
        .map(|RestartRequired { field, reason }| format!("{field}: {reason}"))
        .collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// Opens at most `limit` volumes; see [`SyncCall::open`].
fn open(pods: &PodsDir, attachments: &[Attachment], limit: usize) -> Opened {
    let mut opened = Opened::default();
    for attachment in attachments {
        if opened.data.len() == limit {
            opened.unseen.push(attachment.names());
            continue;
        }
        match pods.open(attachment) {
            Ok(VolumeData::Open(fd)) => opened.data.push((attachment.clone(), fd)),
            Ok(VolumeData::Missing(missing)) => opened.awaited.push(attachment.awaited(missing)),
            Ok(VolumeData::NoPod) => {}
            Err(error) => opened.error = opened.error.or(Some(error)),
        }
    }
    opened
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VMI with the hotpluggable volume `data`, of the attachment pod `hp-1`.
    fn hotplugged() -> serde_json::Value {
        let mut vmi = crate::vmi::testing::scheduled("vm");
        vmi["spec"]["volumes"] = serde_json::json!([
            {"name": "data", "persistentVolumeClaim": {"claimName": "data", "hotpluggable": true}},
        ]);
        vmi["status"]["volumeStatus"] = serde_json::json!([
            {"name": "data", "hotplugVolume": {"attachPodName": "hp-1", "attachPodUID": "1-2"}},
        ]);
        vmi
    }

    #[test]
    fn a_changed_grace_period_waits_for_no_restart() {
        let told = |fields: &[&str]| {
            let restart_required = fields.iter().map(|field| RestartRequired {
                field: (*field).to_owned(),
                reason: "restart".to_owned(),
            });
            waits_for_restart(&SyncVmiResponse {
                restart_required: restart_required.collect(),
                ..SyncVmiResponse::default()
            })
        };
        assert_eq!(told(&[]), None);
        assert_eq!(told(&[GRACE_PERIOD]), None);
        let both = told(&[GRACE_PERIOD, "spec.hostname"]);
        assert_eq!(both.as_deref(), Some("spec.hostname: restart"));
    }

    #[test]
    fn volumes_beyond_the_limit_are_left_and_named() {
        let vmi = Vmi(serde_json::from_value(hotplugged()).unwrap());
        let attachments = Attachment::outstanding(&vmi, &[]);
        let nowhere = tempfile::tempdir().unwrap();
        let nowhere = nowhere.path().to_owned();
        let pods = PodsDir::at(nowhere.clone(), nowhere, "/".into());
        let beyond = open(&pods, &attachments, 0);
        assert_eq!(beyond.unseen, [("data".to_owned(), "hp-1".to_owned())]);
        assert!(beyond.awaited.is_empty());
        let within = open(&pods, &attachments, 1);
        assert!(within.unseen.is_empty());
        assert_eq!(within.awaited.len(), 1);
    }
    #[test]
    fn volume_that_was_removed_meanwhile_is_not_plugged() {
        let of = |vmi: serde_json::Value| Vmi(serde_json::from_value(vmi).unwrap());
        let attachment = Attachment::outstanding(&of(hotplugged()), &[]).remove(0);
        let mut removed = hotplugged();
        removed["spec"]["volumes"] = serde_json::json!([]);
        let mut other = hotplugged();
        other["status"]["volumeStatus"][0]["hotplugVolume"]["attachPodUID"] = "3-4".into();
        for (present, kept) in [
            (Some(of(hotplugged())), 1),
            (Some(of(removed)), 0),
            (Some(of(other)), 0),
            (None, 0),
        ] {
            let data = std::fs::File::open("/dev/null").unwrap();
            let mut opened = vec![(attachment.clone(), data.into())];
            keep_outstanding(&mut opened, present.as_ref());
            assert_eq!(opened.len(), kept, "{present:?}");
        }
    }
}
