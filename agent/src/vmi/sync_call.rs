//! One call of SyncVmi, with the data of the volumes that it plugs.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use husk_proto::fds::{FdSender, Token};
use husk_proto::shim::v1::pod_client::PodClient;
use husk_proto::shim::v1::{RestartRequired, SyncVmiRequest, SyncVmiResponse};
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use tonic::transport::Channel;

use super::attachment::{Attachment, PodsDir, VolumeData};
use super::awaited::{AwaitedVolume, VolumeOfPod};
use super::object::Vmi;
use super::pod::Pod;
use crate::service::OwnerLimits;

/// Maximum number of volumes that one call plugs; a shim keeps 64 descriptors that are not yet claimed. The next call
/// has more.
const MAX_VOLUMES: usize = 32;
/// Maximum time to open the data of all volumes. It may be on a network file system that does not answer.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of a VMI's volumes that are being opened. Each that hangs holds a thread.
const MAX_OPENING: usize = 8;

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
    opening: Opening,
}

/// Attempts to open the data of a VMI's volumes. One may hang, so each volume has at most one at a time.
#[derive(Debug, Clone)]
pub struct Opening {
    volumes: OwnerLimits<VolumeOfPod>,
    threads: Arc<Semaphore>,
}

impl Default for Opening {
    fn default() -> Opening {
        Opening {
            volumes: OwnerLimits::new(1),
            threads: Arc::new(Semaphore::new(MAX_OPENING)),
        }
    }
}

impl Opening {
    /// Opens the data of a volume in a thread of its own, which may outlast `deadline`.
    async fn attempt(
        &self,
        volume: VolumeOfPod,
        deadline: Instant,
        open: impl FnOnce() -> Result<VolumeData, String> + Send + 'static,
    ) -> Result<VolumeData, String> {
        let failed = |why: &str| format!("volume {:?}: attachment pod {}: {why}", volume.0, volume.1);
        let late = failed("its data takes too long to open");
        let not_tried = failed("not opened while the data of other volumes takes too long to open");
        let Some(place) = self.volumes.take(volume) else {
            return Err(late);
        };
        let Ok(permit) = Arc::clone(&self.threads).try_acquire_owned() else {
            return Err(not_tried);
        };
        let opened = spawn_blocking(move || {
            let _held = (place, permit);
            open()
        });
        match timeout_at(deadline, opened).await {
            Ok(opened) => opened.unwrap_or_else(|error| Err(error.to_string())),
            Err(_) => Err(late),
        }
    }
}

/// The result of a call that was made, or that waits for a volume.
#[derive(Debug)]
pub struct Synced {
    pub answer: SyncVmiResponse,
    /// Error of one volume or interface. The other changes were made.
    pub error: Option<String>,
    /// The changes that need a restart, a line for each.
    pub restart: Option<String>,
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
    /// Volumes beyond the limits of number and time.
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
        opening: Opening,
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
        let limit = match self.starts {
            true => usize::MAX,
            false => MAX_VOLUMES,
        };
        let deadline = Instant::now() + OPEN_TIMEOUT;
        let Opened {
            data: mut opened,
            awaited,
            unseen,
            error,
        } = open(&pods, attachments, limit, &self.opening, deadline).await;
        if self.starts && opened.len() < wanted {
            return Ok(Synced {
                answer: SyncVmiResponse::default(),
                error,
                restart: None,
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
        if self.starts {
            // The VM takes descriptors once it runs. A volume that leaves before can be unmounted.
            opened.clear();
        }
        if !opened.is_empty() {
            let (names, fds): (Vec<String>, Vec<(Token, OwnedFd)>) = opened
                .into_iter()
                .map(|(attachment, fd)| (attachment.name, (Token::random(), fd)))
                .unzip();
            let sender = FdSender::connect(&self.descriptors).map_err(|error| {
                let text = format!("the shim's fds.sock: {error}");
                match error.kind() {
                    // The shim has ended.
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused => Status::unavailable(text),
                    _ => Status::internal(text),
                }
            })?;
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
        let refused = refused.or_else(|| failed_interface(&answer));
        Ok(Synced {
            error: error.or(refused),
            restart: waits_for_restart(&answer),
            answer,
            waits: false,
            awaited,
            unseen,
        })
    }
}

/// Closes the data of volumes that the VMI does not have any more, or has from another attachment pod.
fn keep_outstanding(opened: &mut Vec<(Attachment, OwnedFd)>, vmi: Option<&Vmi>) {
    let present = vmi
        .map(|vmi| Attachment::outstanding(vmi, &[]))
        .unwrap_or_default();
    opened.retain(|(attachment, _)| present.contains(attachment));
}

/// The first interface that could not be plugged.
fn failed_interface(answer: &SyncVmiResponse) -> Option<String> {
    let failed = answer.interfaces.iter().find(|nic| nic.phase == "Failed")?;
    Some(format!("interface {:?}: {}", failed.name, failed.message))
}

/// The changes that the VM takes at its next start only, a line for each.
fn waits_for_restart(answer: &SyncVmiResponse) -> Option<String> {
    let others = answer
        .restart_required
        .iter()
        .filter(|change| change.field != GRACE_PERIOD);
    let fields = others.map(|RestartRequired { field, reason }| format!("{field}: {reason}"));
    let interfaces = answer.interfaces.iter();
    let interfaces = interfaces
        .filter(|nic| nic.phase == "RestartRequired")
        .map(|nic| format!("interface {:?}: {}", nic.name, nic.message));
    let lines: Vec<String> = fields.chain(interfaces).collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// Opens at most `limit` volumes whose data is there. A volume that hangs until `deadline` fails. The next call opens
/// those behind it.
async fn open(
    pods: &PodsDir,
    attachments: Vec<Attachment>,
    limit: usize,
    opening: &Opening,
    deadline: Instant,
) -> Opened {
    let mut opened = Opened::default();
    for attachment in attachments {
        let is_late = Instant::now() >= deadline;
        if is_late || opened.data.len() == limit {
            opened.unseen.push(attachment.names());
            let late =
                is_late.then(|| "the data of the hotpluggable volumes takes too long to open".to_owned());
            opened.error = opened.error.or(late);
            continue;
        }
        let (pods, wanted) = (pods.clone(), attachment.clone());
        let attempt = opening.attempt(attachment.names(), deadline, move || pods.open(&wanted));
        match attempt.await {
            Ok(VolumeData::Open(fd)) => opened.data.push((attachment, fd)),
            Ok(VolumeData::Missing(missing)) => opened.awaited.push(attachment.awaited(missing)),
            Ok(VolumeData::NoPod) => {}
            Err(error) => opened.error = opened.error.or(Some(error)),
        }
    }
    opened
}

#[cfg(test)]
mod tests {
    use husk_agent_testing::shim::Shim;
    use husk_proto::shim::v1::{InterfaceStatus, Phase};

    use super::*;
    use crate::vmi::RuntimeDir;

    /// The directories of a kubelet without pods.
    fn nowhere() -> PodsDir {
        let none = PathBuf::from("/nonexistent");
        PodsDir::at(none.clone(), none, "/".into())
    }

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
        let message = |fields: &[&str]| {
            let restart_required = fields.iter().map(|field| RestartRequired {
                field: (*field).to_owned(),
                reason: "restart".to_owned(),
            });
            waits_for_restart(&SyncVmiResponse {
                restart_required: restart_required.collect(),
                ..SyncVmiResponse::default()
            })
        };
        assert_eq!(message(&[]), None);
        assert_eq!(message(&[GRACE_PERIOD]), None);
        let both = message(&[GRACE_PERIOD, "spec.hostname"]);
        assert_eq!(both.as_deref(), Some("spec.hostname: restart"));
    }

    #[test]
    fn an_interface_that_fails_or_stays_is_an_error() {
        let answer = |phase: &str| SyncVmiResponse {
            interfaces: vec![InterfaceStatus {
                name: "red".to_owned(),
                phase: phase.to_owned(),
                message: "why".to_owned(),
                ..InterfaceStatus::default()
            }],
            ..SyncVmiResponse::default()
        };
        let text = Some("interface \"red\": why".to_owned());
        assert_eq!(failed_interface(&answer("Failed")), text);
        assert_eq!(waits_for_restart(&answer("RestartRequired")), text);
        for phase in ["Ready", "Pending", "Detaching", "Absent", "NoNetwork"] {
            let answer = answer(phase);
            assert_eq!(
                failed_interface(&answer).or_else(|| waits_for_restart(&answer)),
                None
            );
        }
    }

    #[tokio::test]
    async fn volumes_beyond_the_limit_are_left_and_named() {
        let vmi = Vmi(serde_json::from_value(hotplugged()).unwrap());
        let pods = nowhere();
        let opened = async |limit, time| {
            let attachments = Attachment::outstanding(&vmi, &[]);
            let deadline = Instant::now() + time;
            open(&pods, attachments, limit, &Opening::default(), deadline).await
        };
        let late = opened(1, Duration::ZERO).await;
        assert!(late.unseen.len() == 1 && late.error.is_some(), "{late:?}");
        let beyond = opened(0, OPEN_TIMEOUT).await;
        assert_eq!(beyond.unseen, [("data".to_owned(), "hp-1".to_owned())]);
        assert!(beyond.awaited.is_empty());
        let within = opened(1, OPEN_TIMEOUT).await;
        assert!(within.unseen.is_empty());
        assert_eq!(within.awaited.len(), 1);
    }

    #[tokio::test]
    async fn data_that_hangs_is_tried_once_at_a_time() {
        let opening = Opening::default();
        let (release, hold) = std::sync::mpsc::channel::<()>();
        let volume = |name: &str| (name.to_owned(), "hp-1".to_owned());
        let soon = || Instant::now() + Duration::from_millis(50);
        let hangs = move || {
            let _ = hold.recv();
            Ok(VolumeData::NoPod)
        };
        let error = opening.attempt(volume("data"), soon(), hangs).await.unwrap_err();
        assert!(
            error.contains("\"data\"") && error.contains("too long"),
            "{error}"
        );
        let again = opening.attempt(volume("data"), soon(), || panic!("opened again"));
        assert_eq!(again.await.unwrap_err(), error);
        let other = opening.attempt(volume("other"), Instant::now() + OPEN_TIMEOUT, || {
            Ok(VolumeData::NoPod)
        });
        other.await.unwrap();
        drop(release);
        while opening.threads.available_permits() < MAX_OPENING {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let later = opening.attempt(volume("data"), Instant::now() + OPEN_TIMEOUT, || {
            Ok(VolumeData::NoPod)
        });
        later.await.unwrap();
    }

    #[tokio::test]
    async fn a_volume_that_hangs_holds_up_no_other_change() {
        let dir = tempfile::tempdir().unwrap();
        let shim = Shim::start(dir.path(), "vm-pod");
        let pod = Pod::find(&RuntimeDir::at(dir.path().to_owned()), "vm-pod").unwrap();
        let vmi = Vmi(serde_json::from_value(hotplugged()).unwrap());
        let opening = Opening::default();
        let _hangs = opening
            .volumes
            .take(("data".to_owned(), "hp-1".to_owned()))
            .unwrap();
        let call = async |starts| {
            let attachments = Attachment::outstanding(&vmi, &[]);
            let (_, latest) = watch::channel(None);
            let call = SyncCall::new(&pod, vmi.manifest(), starts, attachments, latest, opening.clone());
            call.run(nowhere()).await.unwrap()
        };
        let first = call(true).await;
        assert!(first.waits && first.error.is_some(), "{first:?}");
        assert!(shim.calls().is_empty());
        shim.change(|status| status.set_phase(Phase::Running));
        let running = call(false).await;
        assert!(running.error.unwrap().contains("\"data\""));
        assert_eq!(shim.calls(), ["sync"]);
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
