//! A pod that waits for its VMI: `pod.sock` before there is a VM.
//!
//! `SyncVmi` brings the VMI, and is answered when the VM runs. The VM's own server then takes the socket's place, so a
//! client connects again: streams of the waiting pod end without a final phase.

use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::pod_server::{Pod, PodServer};
use husk_proto::shim::v1::{
    AddInterfaceRequest, AddInterfaceResponse, AddVolumeRequest, AddVolumeResponse, Change, ConsoleInput,
    ConsoleOutput, InfoRequest, InfoResponse, KillRequest, KillResponse, PauseRequest, PauseResponse, Phase,
    RemoveInterfaceRequest, RemoveInterfaceResponse, RemoveVolumeRequest, RemoveVolumeResponse, ResetRequest,
    ResetResponse, ResumeRequest, ResumeResponse, SetLinkRequest, SetLinkResponse, ShutdownRequest,
    ShutdownResponse, SnapshotProgress, SnapshotRequest, SoftRebootRequest, SoftRebootResponse,
    Status as VmStatus, SyncVmiRequest, SyncVmiResponse, WatchStatusRequest,
};
use husk_vmi::{Loaded, load};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use super::embedded::EmbeddedVmError;
use super::listener;
use super::supervisor::MESSAGE_BYTES;
use super::sync::short;
use super::vm_error::VmError;
use crate::state::{ClaimedDir, RuntimeDir};

/// Maximum number of calls that wait, each with a manifest.
const CALLS: usize = 4;

/// The VMI that a pod is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmiIdentity {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.uid`.
    pub uid: String,
}

/// A call to a pod that waits for its VMI.
#[derive(Debug)]
pub enum PendingCall {
    /// `SyncVmi`: start the VM.
    Start(StartRequest),
    /// `Shutdown` or `Kill`: end the pod. The caller waits for the answer.
    End(oneshot::Sender<()>),
}

/// A VMI of this pod, to start. The caller of `SyncVmi` waits for the answer.
#[derive(Debug)]
pub struct StartRequest {
    /// The manifest: JSON or YAML.
    pub vmi: String,
    reply: oneshot::Sender<Result<(), VmError>>,
}

impl StartRequest {
    /// Answers the call: the VM runs, or this is why it does not.
    pub fn answer(self, result: Result<(), VmError>) {
        let _ = self.reply.send(result);
    }
}

/// A pod that waits for its VMI. Dropped without [`PendingVm::close`], its directory is abandoned.
#[derive(Debug)]
pub struct PendingVm {
    calls: mpsc::Receiver<PendingCall>,
    claimed: ClaimedDir,
    /// Dropping it ends the server once its calls are answered.
    _finish: oneshot::Sender<()>,
    /// Dropping it ends the streams of the status.
    status: watch::Sender<VmStatus>,
}

impl PendingVm {
    /// Claims the directory of the pod `pod_uid` in `runtime` and serves its socket. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The directory is another VM's, or cannot be written.
    pub fn serve(
        runtime: &RuntimeDir,
        pod_uid: &str,
        identity: VmiIdentity,
    ) -> Result<PendingVm, EmbeddedVmError> {
        let claimed = runtime.claim_launcher(pod_uid)?;
        let incoming = match listener::serve_streams(claimed.dir().path(), "pod.sock") {
            Ok(incoming) => incoming,
            Err(error) => {
                super::remove_dir(claimed);
                return Err(error.into());
            }
        };
        let (sender, calls) = mpsc::channel(CALLS);
        let (status, watched) = watch::channel(VmStatus {
            phase: Phase::Scheduled.into(),
            message: format!(
                "waiting for SyncVmi with {}/{}",
                identity.namespace, identity.name
            ),
            ..VmStatus::default()
        });
        let service = PendingService {
            identity,
            calls: sender,
            status: watched,
        };
        let service = PodServer::new(service).max_decoding_message_size(MESSAGE_BYTES);
        let (finish, finished) = oneshot::channel::<()>();
        let server = Server::builder().serve_with_incoming_shutdown(service, incoming, async {
            let _ = finished.await;
        });
        tokio::spawn(server);
        Ok(PendingVm {
            calls,
            claimed,
            _finish: finish,
            status,
        })
    }

    /// Waits for a call.
    pub async fn call(&mut self) -> PendingCall {
        match self.calls.recv().await {
            Some(call) => call,
            // The server holds a sender for as long as it runs.
            None => std::future::pending().await,
        }
    }

    /// Ends the service and removes the directory. The final status says that there was no VM.
    pub fn close(self) {
        super::remove_dir(self.claimed);
        self.status.send_modify(|status| {
            status.phase = Phase::Failed.into();
            status.reason = "NotStarted".to_owned();
            status.message = "the pod ended before SyncVmi started its VM".to_owned();
        });
    }

    /// Ends the service and returns the directory, for the VM. The call that brought the VMI is still answered.
    pub(super) fn into_claim(self) -> ClaimedDir {
        // The VM's own server binds this path.
        let _ = std::fs::remove_file(self.claimed.dir().socket());
        self.claimed
    }
}

/// The service of a pod that waits for its VMI.
#[derive(Debug)]
struct PendingService {
    identity: VmiIdentity,
    calls: mpsc::Sender<PendingCall>,
    status: watch::Receiver<VmStatus>,
}

impl PendingService {
    /// Ends the pod, or fails if the VM is being started meanwhile.
    async fn end(&self) -> Result<(), Status> {
        let busy = || Status::unavailable("the VM is being started: call again");
        let (reply, ended) = oneshot::channel();
        let sent = self.calls.try_send(PendingCall::End(reply));
        sent.map_err(|_| busy())?;
        ended.await.map_err(|_| busy())
    }
}

impl VmiIdentity {
    /// Checks that a manifest is of this VMI. Blocks for a while if it is large.
    fn check(&self, vmi: &str) -> Result<(), VmError> {
        let invalid = |text: &str| VmError::invalid_argument(short(text));
        let loaded = load(vmi).map_err(|error| invalid(&error.to_string()))?;
        let mut vmis = loaded.iter().filter_map(|loaded| match loaded {
            Loaded::Vmi(vmi) => Some(vmi),
            Loaded::Other { .. } => None,
        });
        let (Some(vmi), None) = (vmis.next(), vmis.next()) else {
            return Err(VmError::invalid_argument("expected one VirtualMachineInstance"));
        };
        // A VMI without a namespace is in the pod's.
        let elsewhere = vmi.namespace != self.namespace && vmi.namespace != "default";
        let uid = vmi.uid.as_ref().filter(|uid| **uid != self.uid);
        match uid {
            _ if vmi.name != self.name => Err(other_vm("metadata.name", &vmi.name, &self.name)),
            _ if elsewhere => Err(other_vm("metadata.namespace", &vmi.namespace, &self.namespace)),
            Some(uid) => Err(other_vm("metadata.uid", uid, &self.uid)),
            None => Ok(()),
        }
    }
}

fn other_vm(field: &str, is: &str, own: &str) -> VmError {
    VmError::wrong_state(format!("{field}: {is:?} is another VM: this pod is for {own:?}"))
}

fn not_started() -> Status {
    Status::failed_precondition("the VM is not started: SyncVmi starts it")
}

#[tonic::async_trait]
impl Pod for PendingService {
    type ConsoleStream = ReceiverStream<Result<ConsoleOutput, Status>>;
    type WatchStatusStream = ReceiverStream<Result<VmStatus, Status>>;
    type SnapshotStream = ReceiverStream<Result<SnapshotProgress, Status>>;

    async fn info(&self, _: Request<InfoRequest>) -> Result<Response<InfoResponse>, Status> {
        Ok(Response::new(InfoResponse {
            namespace: self.identity.namespace.clone(),
            name: self.identity.name.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            monitor_pid: std::process::id(),
            status: Some(self.status.borrow().clone()),
            ..InfoResponse::default()
        }))
    }

    async fn sync_vmi(&self, request: Request<SyncVmiRequest>) -> Result<Response<SyncVmiResponse>, Status> {
        let vmi = request.into_inner().vmi;
        let identity = self.identity.clone();
        // Parsing the largest manifest takes a while.
        let checked = spawn_blocking(move || identity.check(&vmi).map(|()| vmi)).await;
        let vmi = checked.map_err(|error| VmError::internal(error.to_string()))??;
        let (reply, started) = oneshot::channel();
        let request = PendingCall::Start(StartRequest { vmi, reply });
        let busy = |_| Status::unavailable("the VM is being started");
        self.calls.try_send(request).map_err(busy)?;
        started
            .await
            .map_err(|_| Status::unavailable("the pod is ending"))??;
        // Hotpluggable volumes are for the next call, to the VM itself.
        Ok(Response::new(SyncVmiResponse {
            changes: vec![Change {
                kind: Kind::Started.into(),
                name: String::new(),
            }],
            ..SyncVmiResponse::default()
        }))
    }

    async fn shutdown(&self, _: Request<ShutdownRequest>) -> Result<Response<ShutdownResponse>, Status> {
        self.end().await?;
        Ok(Response::new(ShutdownResponse { grace_seconds: 0 }))
    }

    async fn kill(&self, _: Request<KillRequest>) -> Result<Response<KillResponse>, Status> {
        self.end().await?;
        Ok(Response::new(KillResponse {}))
    }

    async fn watch_status(
        &self,
        _: Request<WatchStatusRequest>,
    ) -> Result<Response<Self::WatchStatusStream>, Status> {
        let mut status = self.status.clone();
        let (sender, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            let first = status.borrow_and_update().clone();
            if sender.send(Ok(first)).await.is_err() {
                return;
            }
            // Without a change the VM has taken this pod's place.
            let ended = tokio::select! {
                changed = status.changed() => changed.is_ok(),
                () = sender.closed() => false,
            };
            if ended {
                let last = status.borrow().clone();
                let _ = sender.send(Ok(last)).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn snapshot(&self, _: Request<SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        Err(not_started())
    }

    async fn pause(&self, _: Request<PauseRequest>) -> Result<Response<PauseResponse>, Status> {
        Err(not_started())
    }

    async fn resume(&self, _: Request<ResumeRequest>) -> Result<Response<ResumeResponse>, Status> {
        Err(not_started())
    }

    async fn reset(&self, _: Request<ResetRequest>) -> Result<Response<ResetResponse>, Status> {
        Err(not_started())
    }

    async fn soft_reboot(
        &self,
        _: Request<SoftRebootRequest>,
    ) -> Result<Response<SoftRebootResponse>, Status> {
        Err(not_started())
    }

    async fn add_volume(&self, _: Request<AddVolumeRequest>) -> Result<Response<AddVolumeResponse>, Status> {
        Err(not_started())
    }

    async fn remove_volume(
        &self,
        _: Request<RemoveVolumeRequest>,
    ) -> Result<Response<RemoveVolumeResponse>, Status> {
        Err(not_started())
    }

    async fn add_interface(
        &self,
        _: Request<AddInterfaceRequest>,
    ) -> Result<Response<AddInterfaceResponse>, Status> {
        Err(not_started())
    }

    async fn remove_interface(
        &self,
        _: Request<RemoveInterfaceRequest>,
    ) -> Result<Response<RemoveInterfaceResponse>, Status> {
        Err(not_started())
    }

    async fn set_link(&self, _: Request<SetLinkRequest>) -> Result<Response<SetLinkResponse>, Status> {
        Err(not_started())
    }

    async fn console(
        &self,
        _: Request<Streaming<ConsoleInput>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        Err(not_started())
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::client;

    fn vmi(uid: &str) -> SyncVmiRequest {
        let vmi = serde_json::json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "vm", "namespace": "team", "uid": uid},
            "spec": {"domain": {"devices": {}}},
        });
        SyncVmiRequest {
            vmi: vmi.to_string(),
            ..SyncVmiRequest::default()
        }
    }

    #[tokio::test]
    async fn pod_waits_for_its_own_vmi() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::at(dir.path().join("run"));
        let identity = VmiIdentity {
            name: "vm".into(),
            namespace: "team".into(),
            uid: "1".into(),
        };
        let mut pending = PendingVm::serve(&runtime, "pod", identity).unwrap();
        let vm = runtime.find("pods", "pod").unwrap();
        let mut client = client::connect(&vm).await.unwrap();
        let mut statuses = client
            .watch_status(WatchStatusRequest::default())
            .await
            .unwrap()
            .into_inner();
        let status = statuses.message().await.unwrap().unwrap();
        assert_eq!(status.message, "waiting for SyncVmi with team/vm");
        let code = |result: Result<_, Status>| result.map(|_| ()).unwrap_err().code();
        assert_eq!(code(client.sync_vmi(vmi("2")).await), Code::FailedPrecondition);
        assert_eq!(
            client.pause(PauseRequest {}).await.unwrap_err().code(),
            Code::FailedPrecondition
        );

        let mut caller = client.clone();
        let refused = tokio::spawn(async move { caller.sync_vmi(vmi("1")).await });
        let PendingCall::Start(request) = pending.call().await else {
            panic!("not a start")
        };
        request.answer(Err(VmError::wrong_state("no volume yet")));
        assert_eq!(code(refused.await.unwrap()), Code::FailedPrecondition);

        // The call that starts the VM is answered after the VM has taken the socket's place.
        let started = tokio::spawn(async move { client.sync_vmi(vmi("1")).await });
        let PendingCall::Start(request) = pending.call().await else {
            panic!("not a start")
        };
        let claimed = pending.into_claim();
        assert!(!vm.socket().exists() && vm.is_live());
        request.answer(Ok(()));
        let changes = started.await.unwrap().unwrap().into_inner().changes;
        assert_eq!(changes[0].kind(), Kind::Started);
        assert!(statuses.message().await.unwrap().is_none());
        claimed.remove().unwrap();
    }
}
