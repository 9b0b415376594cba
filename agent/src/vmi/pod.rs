//! The connection to the shim of a launcher pod, and the state of its VM.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use husk_proto::shim::v1::guest_client::GuestClient;
use husk_proto::shim::v1::pod_client::PodClient;
use husk_proto::shim::v1::{Phase, Status, WatchStatusRequest};
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};
use tonic::transport::{Channel, Endpoint};

/// Interval between attempts to reach a shim.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(200);
/// Time after which a shim that answered before, and does not answer, is gone. The VM ends with its shim.
const LOST_TIMEOUT: Duration = Duration::from_secs(3);
/// The same for a shim whose pod waited for its VMI: there is no socket while the machine is built, and until what an
/// attempt that failed has left is removed.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// The same for a shim that has never answered this agent. Its socket is there before virt-controller gives the VMI to
/// the node.
const SILENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The VM of a launcher pod.
#[derive(Debug, Clone, PartialEq)]
pub enum PodState {
    /// The shim has not answered yet.
    Unknown,
    /// The pod waits for its VMI.
    Waiting,
    /// The VM runs, paused or not.
    Running(Box<Status>),
    /// The VM has ended.
    Ended(Box<Status>),
    /// The shim died, and the VM with it.
    Lost,
}

impl PodState {
    /// There is a shim to call.
    pub fn answers(&self) -> bool {
        matches!(self, PodState::Waiting | PodState::Running(_))
    }
}

impl From<Status> for PodState {
    fn from(status: Status) -> PodState {
        match status.phase() {
            Phase::Unspecified | Phase::Scheduled => PodState::Waiting,
            Phase::Running => PodState::Running(Box::new(status)),
            Phase::Succeeded | Phase::Failed => PodState::Ended(Box::new(status)),
        }
    }
}

/// Husk's runtime directory, which is `/run/husk` on a node.
#[derive(Debug, Clone)]
pub struct RuntimeDir(PathBuf);

impl RuntimeDir {
    /// The directory at `path`.
    #[must_use]
    pub fn at(path: PathBuf) -> RuntimeDir {
        RuntimeDir(path)
    }

    /// The directory of a live pod; `None` if this is not a UID. It comes from the API and becomes part of a path.
    pub fn pod(&self, uid: &str) -> Option<PathBuf> {
        let valid = !uid.is_empty()
            && uid
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        valid.then(|| self.0.join("pods").join(uid))
    }

    /// The last status of the pod's VM, which its shim recorded.
    pub fn ended(&self, uid: &str) -> Option<Status> {
        self.pod(uid)?;
        let record = std::fs::read(self.record(uid)).ok()?;
        Status::decode(&record[..]).ok()
    }

    /// Removes the record of a pod's end.
    pub fn forget(&self, uid: &str) {
        let _ = std::fs::remove_file(self.record(uid));
    }

    /// Removes the records of all pods but `pods`: their VMIs were deleted when no agent ran.
    pub fn forget_others(&self, pods: &HashSet<&str>) {
        let records = std::fs::read_dir(self.0.join(".ended"));
        for record in records.into_iter().flatten().flatten() {
            let name = record.file_name();
            if !name.to_str().is_some_and(|name| pods.contains(name)) {
                let _ = std::fs::remove_file(record.path());
            }
        }
    }

    fn record(&self, uid: &str) -> PathBuf {
        self.0.join(".ended").join(uid)
    }
}

/// A launcher pod that runs under Husk.
#[derive(Debug)]
pub struct Pod {
    uid: String,
    directory: PathBuf,
    client: PodClient<Channel>,
    state: watch::Receiver<PodState>,
    follower: Option<AbortHandle>,
}

impl Pod {
    /// The pod `uid`, if Husk has a directory for it, or a record of its end.
    pub fn find(runtime: &RuntimeDir, uid: &str) -> Option<Pod> {
        let directory = runtime.pod(uid)?;
        let ended = runtime.ended(uid).map(PodState::from);
        if !directory.is_dir() && ended.is_none() {
            return None;
        }
        let client = PodClient::new(channel(directory.join("pod.sock")));
        let (sender, state) = watch::channel(ended.clone().unwrap_or(PodState::Unknown));
        let follower = match ended {
            Some(_) => None,
            None => {
                let follower = follow(client.clone(), sender, runtime.clone(), uid.to_owned());
                Some(tokio::spawn(follower).abort_handle())
            }
        };
        Some(Pod {
            uid: uid.to_owned(),
            directory,
            client,
            state,
            follower,
        })
    }

    /// Its UID.
    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// The present state of its VM.
    pub fn state(&self) -> PodState {
        self.state.borrow().clone()
    }

    /// Returns after the state has changed; never once it cannot change.
    pub async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Path of the socket to which descriptors are sent; it is there while the VM runs.
    pub fn descriptors(&self) -> PathBuf {
        self.directory.join("fds.sock")
    }

    /// A client of its shim. Each call connects again if it must.
    pub fn client(&self) -> PodClient<Channel> {
        self.client.clone()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if let Some(follower) = &self.follower {
            follower.abort();
        }
    }
}

/// Clients of the pod's shim and of the guest's agent, if the pod has a directory.
pub fn live_clients(runtime: &RuntimeDir, uid: &str) -> Option<(PodClient<Channel>, GuestClient<Channel>)> {
    let directory = runtime.pod(uid)?;
    if !directory.is_dir() {
        return None;
    }
    let channel = channel(directory.join("pod.sock"));
    Some((PodClient::new(channel.clone()), GuestClient::new(channel)))
}

fn channel(socket: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_| {
        let path = socket.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://pod").connect_timeout(Duration::from_secs(5));
    endpoint.connect_with_connector_lazy(connector)
}

/// Sends each state of the pod's VM until the last one.
async fn follow(
    mut client: PodClient<Channel>,
    state: watch::Sender<PodState>,
    runtime: RuntimeDir,
    uid: String,
) {
    let mut answered = false;
    let start = Instant::now();
    loop {
        let mut failed = None;
        if let Ok(answer) = client.watch_status(WatchStatusRequest::default()).await {
            let mut stream = answer.into_inner();
            while let Ok(Some(status)) = stream.message().await {
                answered = true;
                if status.phase() == Phase::Failed {
                    failed = Some(status);
                    break;
                }
                let next = PodState::from(status);
                let ended = matches!(next, PodState::Ended(_));
                state.send_if_modified(|state| {
                    let changed = *state != next;
                    *state = next;
                    changed
                });
                if ended {
                    return;
                }
            }
        }
        if !answered && start.elapsed() < SILENT_TIMEOUT {
            sleep(RECONNECT_INTERVAL).await;
            continue;
        }
        let timeout = if failed.is_some() || *state.borrow() == PodState::Waiting {
            START_TIMEOUT
        } else {
            LOST_TIMEOUT
        };
        // A VM that ended has a record. If only an attempt to start it failed, the pod waits again.
        let is_final = || runtime.ended(&uid).is_some();
        if !answers_within(&mut client, timeout, is_final).await {
            let last = failed.or_else(|| runtime.ended(&uid));
            let last = last.map_or(PodState::Lost, PodState::from);
            state.send_replace(last);
            return;
        }
    }
}

/// True if the pod has a VM or waits for one within `timeout`; false at once if `is_final`.
async fn answers_within(
    client: &mut PodClient<Channel>,
    timeout: Duration,
    is_final: impl Fn() -> bool,
) -> bool {
    let deadline = Instant::now() + timeout;
    while Instant::now() < deadline && !is_final() {
        sleep(RECONNECT_INTERVAL).await;
        let call = client.info(husk_proto::shim::v1::InfoRequest {});
        if let Ok(Ok(answer)) = tokio::time::timeout_at(deadline, call).await {
            let status = answer.into_inner().status.unwrap_or_default();
            if !matches!(status.phase(), Phase::Succeeded | Phase::Failed) {
                return true;
            }
        }
    }
    false
}
