//! The actor of one VMI reconciles it: it applies the VMI's spec to the pod's VM, and writes the VM's state to the status.
//!
//! Each round compares the present object with the present VM. An actor's memory is not persistent: after a restart of
//! the agent it calls SyncVmi once more and may repeat an event.

mod reports;
mod write_retry;

use std::sync::Arc;
use std::time::Duration;

use husk_proto::shim::v1::{KillRequest, ShutdownRequest, SyncVmiResponse};
use jiff::Timestamp;
use kube::api::PostParams;
use kube::core::DynamicObject;
use kube::{Api, Client};
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;
use tracing::{debug, warn};

use super::attachment::{Attachment, PodsDir};
use super::awaited::AwaitedVolumes;
use super::foreign::ForeignEntry;
use super::guest_panics::GuestPanics;
use super::object::{self, Vmi};
use super::pod::{Pod, PodState, RuntimeDir};
use super::status::{self, Observed};
use super::sync_call::{Opening, SyncCall, Synced};
use crate::event::{EventSender, Kind};
use write_retry::WriteRetry;

/// Interval at which the agent looks again for what it cannot watch: a pod's directory, a volume that is not there yet.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Delay after an error, doubled up to the maximum.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(30);
/// Delay after an error of a volume: another volume may be there by then.
const VOLUME_RETRY: Duration = Duration::from_secs(5);
/// Time after which the pod of a VMI that was given to this node is taken as not Husk's. Husk's pods have their
/// directories before.
const FOREIGN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time of a call to the shim that does not wait for a guest.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The next step after a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Nothing until something changes.
    Wait,
    /// Another round after this time, or when something changes.
    After(Duration),
    /// The VMI is gone, and its VM too.
    End,
}

impl Next {
    /// The same, or another round after this time.
    fn within(self, time: Duration) -> Next {
        match self {
            Next::Wait => Next::After(time),
            Next::After(other) => Next::After(other.min(time)),
            Next::End => Next::End,
        }
    }
}

/// A call of SyncVmi that is under way.
#[derive(Debug)]
struct Sync {
    desired: Value,
    starts: bool,
    call: JoinHandle<Result<Synced, tonic::Status>>,
}

/// The actor of one VMI.
pub struct VmiActor {
    node: String,
    runtime: RuntimeDir,
    pods: PodsDir,
    client: Client,
    events: EventSender,
    /// The object as the watch has it; `None` once it is deleted.
    object: watch::Receiver<Option<Arc<Vmi>>>,
    /// The same for calls of SyncVmi, which may outlive the actor.
    latest: watch::Sender<Option<Arc<Vmi>>>,
    /// The object that the last PUT returned, until the watch delivers it.
    written: Option<Arc<Vmi>>,
    pod: Option<Pod>,
    sync: Option<Sync>,
    /// What the last successful SyncVmi applied ([`Vmi::desired`]), and its answer.
    synced: Option<(Value, SyncVmiResponse)>,
    /// Another call for the same VMI may mend `error`. One that waits for a restart of the VM stays.
    retries: bool,
    /// Error of the last call.
    error: Option<String>,
    /// The time of the next call, unless [`Vmi::desired`] has changed since the last one.
    pause: Option<(Instant, Value)>,
    retry: Duration,
    /// Grace period of the last Shutdown call, in seconds.
    grace: Option<u64>,
    /// This actor started the VM.
    started: bool,
    /// When the shim answered that it starts the VM. Its status says so a little later.
    start_answered: Option<Instant>,
    write_retry: WriteRetry,
    /// Panics of the guest that have had an event, or that another agent has seen.
    panics: Option<u64>,
    /// Hotplugged volumes in the last status.
    plugged: Vec<String>,
    awaited: AwaitedVolumes,
    opening: Opening,
    /// The time when a VMI of this node was first seen without a directory of Husk's for its pod.
    without_pod: Option<Instant>,
    foreign: ForeignEntry,
    guest_panics: GuestPanics,
    /// The I/O error that pauses the VM, and has had an event.
    io_error: Option<String>,
}

impl std::fmt::Debug for VmiActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmiActor")
            .field("pod", &self.pod)
            .finish_non_exhaustive()
    }
}

impl VmiActor {
    /// An actor on `node`.
    pub fn new(
        node: String,
        (runtime, pods): (RuntimeDir, PodsDir),
        client: Client,
        events: EventSender,
        foreign: ForeignEntry,
        guest_panics: GuestPanics,
        object: watch::Receiver<Option<Arc<Vmi>>>,
    ) -> VmiActor {
        VmiActor {
            node,
            runtime,
            pods,
            client,
            events,
            object,
            latest: watch::Sender::new(None),
            written: None,
            pod: None,
            sync: None,
            synced: None,
            retries: false,
            error: None,
            pause: None,
            retry: FIRST_RETRY,
            grace: None,
            started: false,
            start_answered: None,
            write_retry: WriteRetry::default(),
            panics: None,
            plugged: Vec::new(),
            awaited: AwaitedVolumes::default(),
            opening: Opening::default(),
            without_pod: None,
            foreign,
            guest_panics,
            io_error: None,
        }
    }

    /// Runs until the VMI is deleted and its VM has ended.
    pub async fn run(mut self) {
        loop {
            let pause = match self.round().await {
                Next::End => return,
                Next::Wait => None,
                Next::After(pause) => Some(pause),
            };
            tokio::select! {
                changed = self.object.changed() => {
                    // The controller has ended.
                    if changed.is_err() {
                        return;
                    }
                }
                () = pod_changed(&mut self.pod) => {}
                answer = sync_ended(&mut self.sync) => self.take(answer).await,
                () = sleep(pause.unwrap_or_default()), if pause.is_some() => {}
            }
        }
    }

    /// The newest object that the agent knows.
    fn vmi(&mut self) -> Option<Arc<Vmi>> {
        let watched = self.object.borrow_and_update().clone();
        self.latest.send_replace(watched.clone());
        let watched = watched?;
        if let Some(written) = &self.written {
            if written.version() > watched.version() {
                return Some(Arc::clone(written));
            }
            self.written = None;
        }
        Some(watched)
    }

    async fn round(&mut self) -> Next {
        let Some(vmi) = self.vmi() else {
            return self.handle_deleted().await;
        };
        self.find_pod(&vmi);
        let state = self.pod.as_ref().map_or(PodState::Unknown, Pod::state);
        if state == PodState::Unknown {
            return self.handle_foreign_or_lost_pod(&vmi).await;
        }
        self.without_pod = None;
        self.foreign.remove();
        self.report_unplugged(&vmi).await;
        if vmi.is_final() {
            if state.answers() && self.grace != Some(0) && !self.shut_down(&vmi, &state, 0).await {
                return Next::After(LOOK_INTERVAL);
            }
            return Next::Wait;
        }
        self.report_panics(&vmi, &state).await;
        self.report_io_error(&vmi, &state).await;
        let mut next = Next::Wait;
        if vmi.is_deleting() {
            let grace = vmi.grace_seconds();
            if state.answers() && self.grace.is_none_or(|earlier| grace < earlier) {
                let sent = self.shut_down(&vmi, &state, grace).await;
                next = if sent {
                    Next::Wait
                } else {
                    Next::After(LOOK_INTERVAL)
                };
            }
        } else if status::phase(&vmi, &state) == vmi.phase() {
            next = self.begin_sync(&vmi, &state);
        }
        match self.write(&vmi, &state).await {
            Ok(()) => next,
            Err(pause) => next.within(pause),
        }
    }

    /// Handles a VMI for which no pod under Husk is known: its pod is starting, the node was reset, or the pod is not
    /// Husk's. In the last case the VMI is never written.
    async fn handle_foreign_or_lost_pod(&mut self, vmi: &Arc<Vmi>) -> Next {
        if self.pod.is_some()
            || !matches!(vmi.phase(), "Scheduled" | "Running")
            || vmi.pods_on(&self.node).is_empty()
        {
            self.without_pod = None;
            self.foreign.remove();
            return match self.pod.is_some() {
                true => Next::After(LOOK_INTERVAL),
                false => Next::Wait,
            };
        }
        let since = *self.without_pod.get_or_insert_with(Instant::now);
        let is_late = since.elapsed() >= FOREIGN_TIMEOUT;
        // Directories and records do not outlive a reset of the node, and the kubelet starts no container again.
        if is_late && (vmi.ran_under_husk() || self.pods.have_ended(&vmi.pods_on(&self.node))) {
            let pause = self.write(vmi, &PodState::Lost).await.err();
            return Next::After(pause.unwrap_or(LOOK_INTERVAL));
        }
        let name = format!("{}/{}", vmi.namespace(), vmi.name());
        if is_late && self.foreign.insert(&name) {
            warn!(vmi = name, "the launcher pod does not run under Husk");
            let message = "The launcher pod does not run under Husk: husk-agent does not manage this VMI, and no other \
                           VMI is scheduled on its node";
            self.events
                .send(vmi, Kind::Warning, "ForeignLauncher", message)
                .await;
        }
        Next::After(LOOK_INTERVAL)
    }

    /// Finds the pod of the VMI for which Husk has a directory or a record.
    fn find_pod(&mut self, vmi: &Vmi) {
        let uids = vmi.pods_on(&self.node);
        if self.pod.as_ref().is_some_and(|pod| !uids.contains(&pod.uid())) {
            self.pod = None;
        }
        if self.pod.is_none() {
            self.pod = uids.iter().find_map(|uid| Pod::find(&self.runtime, uid));
        }
    }

    /// Kills the VM of a VMI that was deleted, and ends the actor after it.
    async fn handle_deleted(&mut self) -> Next {
        let Some(pod) = &self.pod else {
            return Next::End;
        };
        if !pod.state().answers() {
            self.runtime.forget(pod.uid());
            return Next::End;
        }
        let mut client = pod.client();
        match timeout(CALL_TIMEOUT, client.kill(KillRequest {})).await {
            // The end of the VM is the next change.
            Ok(Ok(_)) => Next::Wait,
            _ => Next::After(LOOK_INTERVAL),
        }
    }

    /// Ends the VM within `grace` seconds, which the shim counts from the first request. Returns whether the shim has
    /// the request.
    async fn shut_down(&mut self, vmi: &Vmi, state: &PodState, grace: u64) -> bool {
        let Some(pod) = &self.pod else {
            return true;
        };
        let mut client = pod.client();
        let runs = matches!(state, PodState::Running(_));
        let call = async {
            match runs && grace > 0 {
                true => {
                    let request = ShutdownRequest {
                        grace_seconds: Some(grace),
                    };
                    client.shutdown(request).await.map(drop)
                }
                false => client.kill(KillRequest {}).await.map(drop),
            }
        };
        match timeout(CALL_TIMEOUT, call).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                warn!(
                    vmi = vmi.name(),
                    error = error.message(),
                    "the VM was not shut down"
                );
                return false;
            }
            Err(_) => {
                warn!(vmi = vmi.name(), "the shim does not answer");
                return false;
            }
        }
        let first = self.grace.replace(grace).is_none();
        if runs && grace == 0 {
            let message = "VirtualMachineInstance stopping";
            self.events.send(vmi, Kind::Normal, "Deleted", message).await;
        } else if runs && first {
            let message = "Signaled Graceful Shutdown";
            self.events.send(vmi, Kind::Normal, "ShuttingDown", message).await;
        }
        true
    }

    /// Calls SyncVmi in a task of its own, if the VM differs from the VMI.
    fn begin_sync(&mut self, vmi: &Vmi, state: &PodState) -> Next {
        if self.sync.is_some() {
            return Next::Wait;
        }
        // A VM that is being shut down takes no changes.
        if matches!(state, PodState::Running(status) if status.stopping) {
            return Next::Wait;
        }
        let starts = *state == PodState::Waiting;
        if starts
            && let Some(at) = self.start_answered
            && let Some(rest) = LOOK_INTERVAL.checked_sub(at.elapsed())
        {
            return Next::After(rest);
        }
        let desired = vmi.desired();
        let done = self
            .synced
            .as_ref()
            .is_some_and(|(before, answer)| *before == desired && answer.complete);
        if done && !starts && !self.retries {
            return Next::Wait;
        }
        if let Some((until, asked)) = &self.pause
            && *asked == desired
            && let Some(rest) = until.checked_duration_since(Instant::now())
        {
            return Next::After(rest);
        }
        let Some(pod) = &self.pod else {
            return Next::Wait;
        };
        let attached: Vec<&str> = match state {
            PodState::Running(status) => {
                let disks = status.disks.iter().filter(|disk| !disk.is_empty_drive());
                disks.map(|disk| disk.name.as_str()).collect()
            }
            _ => Vec::new(),
        };
        let attachments = Attachment::outstanding(vmi, &attached);
        let opening = self.opening.clone();
        let latest = self.latest.subscribe();
        let call = SyncCall::new(pod, vmi.manifest(), starts, attachments, latest, opening);
        let call = tokio::spawn(call.run(self.pods.clone()));
        // The VM can run before the answer is here.
        self.started |= starts;
        self.sync = Some(Sync {
            desired,
            starts,
            call,
        });
        Next::Wait
    }

    /// Takes the answer to a call of SyncVmi.
    async fn take(&mut self, answer: Result<Synced, tonic::Status>) {
        let Some(sync) = self.sync.take() else {
            return;
        };
        let mut retry = self.retry;
        let error = match answer {
            Ok(synced) => {
                self.retries = synced.error.is_some();
                self.report_lost_writes(&synced.answer).await;
                self.report_awaited(&synced.awaited, &synced.unseen).await;
                retry = VOLUME_RETRY;
                // The start says nothing of hotpluggable volumes.
                let started = sync.starts && !synced.waits;
                self.start_answered = started.then(Instant::now);
                let complete = synced.answer.complete;
                if synced.waits {
                    self.started = false;
                    if let Some(vmi) = self.vmi() {
                        debug!(vmi = vmi.name(), "a hotpluggable volume is not on the node yet");
                    }
                }
                self.synced = (!started).then(|| (sync.desired.clone(), synced.answer));
                match synced.error.or(synced.restart) {
                    Some(error) => error,
                    None => {
                        self.error = None;
                        self.retry = FIRST_RETRY;
                        let again = (!complete && !started).then(|| Instant::now() + LOOK_INTERVAL);
                        self.pause = again.map(|again| (again, sync.desired));
                        return;
                    }
                }
            }
            // The VM is being started, or has ended. The pod's status says what comes of it.
            Err(error) if error.code() == Code::Unavailable || (!sync.starts && !self.takes_changes()) => {
                debug!(error = error.message(), "the VM takes no changes now");
                self.pause = Some((Instant::now() + LOOK_INTERVAL, sync.desired));
                return;
            }
            Err(error) => {
                self.retries = true;
                match error.message() {
                    "" => error.to_string(),
                    text => text.to_owned(),
                }
            }
        };
        let known = self.error.replace(error.clone());
        if let Some(vmi) = self.vmi()
            && known.as_ref() != Some(&error)
        {
            warn!(
                vmi = vmi.name(),
                namespace = vmi.namespace(),
                error,
                "SyncVmi failed"
            );
            self.events.send(&vmi, Kind::Warning, "SyncFailed", &error).await;
        }
        self.pause = Some((Instant::now() + retry, sync.desired));
        self.retry = (self.retry * 2).min(LAST_RETRY);
    }

    /// True if the VM runs and is not being shut down.
    fn takes_changes(&self) -> bool {
        let state = self.pod.as_ref().map(Pod::state);
        matches!(state, Some(PodState::Running(status)) if !status.stopping)
    }

    /// Writes the status if it is not up to date. `Err` has the time after which to look again.
    async fn write(&mut self, vmi: &Arc<Vmi>, state: &PodState) -> Result<(), Duration> {
        let observed = Observed {
            state,
            synced: self.synced.as_ref().map(|(_, answer)| answer),
            syncing: self.sync.is_some(),
            error: self.error.as_deref(),
            now: Timestamp::now(),
        };
        let new = status::next(vmi, &observed);
        if new == *vmi.status() {
            return Ok(());
        }
        if let Some(rest) = self.write_retry.rest() {
            return Err(rest);
        }
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &vmi.namespace(), &object::resource());
        let object = vmi.with_status(new);
        let name = vmi.name();
        let params = PostParams::default();
        match timeout(CALL_TIMEOUT, api.replace(&name, &params, &object)).await {
            Ok(Ok(mut written)) => {
                object::forget_managers(&mut written);
                let written = Arc::new(Vmi(written));
                self.written = Some(Arc::clone(&written));
                self.write_retry.succeeded();
                self.report(vmi, &written).await;
                Ok(())
            }
            // The watch has a newer object soon.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Err(LOOK_INTERVAL),
            Ok(Err(error)) => {
                let refused = matches!(error, kube::Error::Api(_));
                Err(self.not_written(&name, &error.to_string(), refused))
            }
            Err(_) => Err(self.not_written(&name, "the API server does not answer", false)),
        }
    }

    /// Logs an error that is new. Returns the time until the next write.
    fn not_written(&mut self, vmi: &str, error: &str, refused: bool) -> Duration {
        let (pause, is_new) = self.write_retry.failed(error, refused);
        if is_new {
            warn!(vmi, error, "the status was not written");
        }
        pause
    }
}

async fn pod_changed(pod: &mut Option<Pod>) {
    match pod {
        Some(pod) => pod.changed().await,
        None => std::future::pending().await,
    }
}

async fn sync_ended(sync: &mut Option<Sync>) -> Result<Synced, tonic::Status> {
    match sync {
        Some(sync) => (&mut sync.call)
            .await
            .unwrap_or_else(|error| Err(tonic::Status::internal(error.to_string()))),
        None => std::future::pending().await,
    }
}
