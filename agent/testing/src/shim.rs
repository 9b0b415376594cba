//! The shim of a launcher pod: it waits for its VMI, and then has a VM.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::{Stream, StreamExt};
use husk_proto::fds::{FdReceiver, Token};
use husk_proto::services::either;
use husk_proto::shim::v1::guest_server::{Guest, GuestServer};
use husk_proto::shim::v1::pod_server::{Pod, PodServer};
use husk_proto::shim::v1::*;
use husk_proto::vmm::v1::ExitReason;
use prost::Message;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream, WatchStream};
use tonic::{Request, Response, Status as Error, Streaming};

/// A launcher pod's shim.
#[derive(Debug, Clone)]
pub struct Shim {
    state: Arc<Mutex<State>>,
    status: Arc<watch::Sender<Status>>,
    /// `SyncVmi` is not answered.
    holds: Arc<watch::Sender<bool>>,
    /// Number of console sessions.
    sessions: Arc<watch::Sender<u32>>,
    descriptors: FdReceiver,
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<String>,
    /// Error of the next starts.
    refusal: Option<String>,
    /// The VMM has ended, which the status does not say yet.
    vmm_ended: bool,
    /// The guest runs only when the test says so.
    boots_late: bool,
    /// The answer to `Info`, but for the status.
    info: InfoResponse,
    /// The answer of the guest agent to `Info`. `None`: the guest has no agent.
    guest: Option<GuestInfoResponse>,
    /// `Info` is never answered.
    hangs: bool,
    /// The guest has locked its trays.
    locked: bool,
    /// Consoles have output without end.
    floods: bool,
    server: Option<AbortHandle>,
    directory: PathBuf,
    record: PathBuf,
}

impl Shim {
    /// Starts the shim of the pod `uid` in the runtime directory `runtime`.
    pub fn start(runtime: &Path, uid: &str) -> Shim {
        let directory = runtime.join("pods").join(uid);
        std::fs::create_dir_all(&directory).unwrap();
        let waiting = Status {
            phase: Phase::Scheduled.into(),
            ..Status::default()
        };
        let descriptors = listen(&directory.join("fds.sock"));
        let shim = Shim {
            state: Arc::default(),
            status: Arc::new(watch::Sender::new(waiting)),
            holds: Arc::new(watch::Sender::new(false)),
            sessions: Arc::new(watch::Sender::new(0)),
            descriptors,
        };
        shim.state().directory = directory.clone();
        shim.state().record = runtime.join(".ended").join(uid);
        shim.serve();
        shim
    }

    fn serve(&self) {
        let socket = self.state().directory.join("pod.sock");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(socket).unwrap();
        let service = either(PodServer::new(self.clone()), GuestServer::new(self.clone()));
        let server = tonic::transport::Server::builder()
            .serve_with_incoming(service, UnixListenerStream::new(listener));
        let server = tokio::spawn(async move { server.await.unwrap() });
        self.state().server = Some(server.abort_handle());
    }

    /// Waits for its VMI again, after [`Shim::kill`].
    pub fn wait_again(&self) {
        self.change(|status| {
            status.phase = Phase::Scheduled.into();
            status.message.clear();
        });
        self.serve();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// The calls that change something, in order.
    pub fn calls(&self) -> Vec<String> {
        self.state().calls.clone()
    }

    /// Number of calls that started the VM.
    pub fn starts(&self) -> usize {
        self.calls().iter().filter(|call| *call == "start").count()
    }

    /// Refuses to start the VM, or no longer does.
    pub fn refuse(&self, reason: Option<&str>) {
        self.state().refusal = reason.map(str::to_owned);
    }

    /// Lets the guest run only after [`Shim::boot`], which comes after the answer to the start.
    pub fn boot_late(&self) {
        self.state().boots_late = true;
    }

    /// Lets the guest run.
    pub fn boot(&self) {
        self.change(|status| status.set_phase(Phase::Running));
    }

    /// Changes the answer to `Info`.
    pub fn describe(&self, info: InfoResponse) {
        self.state().info = info;
    }

    /// Changes what the guest's agent tells.
    pub fn tell(&self, guest: Option<GuestInfoResponse>) {
        let state = guest.clone().map(|guest| GuestState {
            connected: guest.connected,
            os: guest.os,
            interfaces: guest.interfaces,
            frozen: guest.frozen,
            ..GuestState::default()
        });
        self.state().guest = guest;
        self.change(|status| status.guest = state);
    }

    /// Answers no `Info` from now on.
    pub fn hang(&self) {
        self.state().hangs = true;
    }

    /// Holds up calls of `SyncVmi`, or lets them go on.
    pub fn hold(&self, holds: bool) {
        self.holds.send_replace(holds);
    }

    /// Locks the trays of CD-ROM drives, or unlocks them.
    pub fn lock(&self, locked: bool) {
        self.state().locked = locked;
    }

    /// Writes to new consoles without end.
    pub fn flood(&self) {
        self.state().floods = true;
    }

    /// The status of the VM.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Changes the status of the VM.
    pub fn change(&self, change: impl FnOnce(&mut Status)) {
        self.status.send_modify(change);
    }

    /// Ends the VMM: `SyncVmi` says so, and the status only after [`Shim::end`].
    pub fn end_vmm(&self) {
        self.state().vmm_ended = true;
    }

    /// Ends the VM: removes its directory, and leaves a record of the end.
    pub fn end(&self, phase: Phase, reason: &str) {
        let ended = Status {
            phase: phase.into(),
            reason: reason.to_owned(),
            panics: self.status.borrow().panics + u64::from(reason == "GuestPanic"),
            exit: match reason {
                "GuestPanic" => ExitReason::GuestPanic.into(),
                _ => ExitReason::Unspecified.into(),
            },
            ..Status::default()
        };
        let (directory, record) = {
            let state = self.state();
            (state.directory.clone(), state.record.clone())
        };
        std::fs::create_dir_all(record.parent().unwrap()).unwrap();
        std::fs::write(record, ended.encode_to_vec()).unwrap();
        let _ = std::fs::remove_dir_all(directory);
        self.status.send_replace(ended);
    }

    /// Ends the shim as SIGKILL does. Its directory stays.
    pub fn kill(&self) {
        self.status
            .send_modify(|status| status.message = "killed".to_owned());
        if let Some(server) = self.state().server.take() {
            server.abort();
        }
    }

    /// Plugs the volumes whose descriptors have come, and unplugs those that the VMI does not have. A drive stays,
    /// empty.
    async fn plug(&self, vmi: &serde_json::Value, request: &SyncVmiRequest) {
        let mut disks = self.status.borrow().disks.clone();
        let (volumes, locked) = (vmi["spec"]["volumes"].as_array().unwrap(), self.state().locked);
        disks.retain(|disk| locked || volumes.iter().any(|volume| volume["name"] == disk.name.as_str()));
        disks.retain(|disk| !request.fds.contains_key(&disk.name));
        for (name, fd) in &request.fds {
            let fd = self.descriptors.take(Token::try_from(fd).unwrap()).await.unwrap();
            assert!(rustix::fs::fstat(&fd).is_ok());
            disks.push(Disk {
                name: name.clone(),
                target: "sda".to_owned(),
                plugged: true,
                ..Disk::default()
            });
        }
        let empty = drives(vmi).filter(|drive| disks.iter().all(|disk| disk.name != drive.name));
        let empty: Vec<Disk> = empty.collect();
        disks.extend(empty);
        self.status.send_if_modified(|status| {
            let changed = status.disks != disks;
            status.disks = disks;
            changed
        });
    }

    fn called(&self, call: impl Into<String>) {
        self.state().calls.push(call.into());
    }
}

/// The CD-ROM drives of a VMI, without discs.
fn drives(vmi: &serde_json::Value) -> impl Iterator<Item = Disk> {
    let disks = vmi["spec"]["domain"]["devices"]["disks"].as_array();
    let drives = disks
        .into_iter()
        .flatten()
        .filter(|disk| disk["cdrom"].is_object());
    drives.map(|drive| Disk {
        name: drive["name"].as_str().unwrap().to_owned(),
        target: "sda".to_owned(),
        bytes: Some(0),
        ..Disk::default()
    })
}

/// A socket for descriptors.
fn listen(path: &Path) -> FdReceiver {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 8).unwrap();
    FdReceiver::listen(socket, 64, |_| true).unwrap()
}

async fn succeeded(status: &mut watch::Receiver<Status>) {
    let _ = status.wait_for(|status| status.phase() == Phase::Succeeded).await;
}

type Answer<T> = Result<Response<T>, Error>;
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Error>> + Send>>;

#[tonic::async_trait]
impl Pod for Shim {
    async fn info(&self, _: Request<InfoRequest>) -> Answer<InfoResponse> {
        if self.status.borrow().message == "killed" {
            return Err(Error::unavailable("killed"));
        }
        if self.state().hangs {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(InfoResponse {
            status: Some(self.status.borrow().clone()),
            ..self.state().info.clone()
        }))
    }

    async fn pause(&self, _: Request<PauseRequest>) -> Answer<PauseResponse> {
        self.called("pause");
        self.change(|status| status.paused = true);
        Ok(Response::new(Default::default()))
    }

    async fn resume(&self, _: Request<ResumeRequest>) -> Answer<ResumeResponse> {
        self.called("resume");
        self.change(|status| status.paused = false);
        Ok(Response::new(Default::default()))
    }

    async fn reset(&self, _: Request<ResetRequest>) -> Answer<ResetResponse> {
        self.called("reset");
        Ok(Response::new(Default::default()))
    }

    type SnapshotStream = Answers<SnapshotProgress>;

    async fn snapshot(&self, _: Request<SnapshotRequest>) -> Answer<Self::SnapshotStream> {
        Err(Error::unimplemented(""))
    }

    async fn soft_reboot(&self, _: Request<SoftRebootRequest>) -> Answer<SoftRebootResponse> {
        self.called("soft_reboot");
        Ok(Response::new(Default::default()))
    }

    async fn shutdown(&self, request: Request<ShutdownRequest>) -> Answer<ShutdownResponse> {
        let grace = request.into_inner().grace_seconds.unwrap_or(30);
        self.called(format!("shutdown {grace}"));
        self.change(|status| status.stopping = true);
        Ok(Response::new(Default::default()))
    }

    async fn kill(&self, _: Request<KillRequest>) -> Answer<KillResponse> {
        self.called("kill");
        self.end(Phase::Failed, "Killed");
        Ok(Response::new(Default::default()))
    }

    async fn add_volume(&self, _: Request<AddVolumeRequest>) -> Answer<AddVolumeResponse> {
        Err(Error::unimplemented(""))
    }

    async fn remove_volume(&self, _: Request<RemoveVolumeRequest>) -> Answer<RemoveVolumeResponse> {
        Err(Error::unimplemented(""))
    }

    async fn add_interface(&self, _: Request<AddInterfaceRequest>) -> Answer<AddInterfaceResponse> {
        Err(Error::unimplemented(""))
    }

    async fn remove_interface(&self, _: Request<RemoveInterfaceRequest>) -> Answer<RemoveInterfaceResponse> {
        Err(Error::unimplemented(""))
    }

    async fn set_link(&self, _: Request<SetLinkRequest>) -> Answer<SetLinkResponse> {
        Err(Error::unimplemented(""))
    }

    async fn sync_vmi(&self, request: Request<SyncVmiRequest>) -> Answer<SyncVmiResponse> {
        let request = request.into_inner();
        let vmi: serde_json::Value = serde_json::from_str(&request.vmi).unwrap();
        assert_eq!(vmi["kind"], "VirtualMachineInstance");
        if let Some(refusal) = self.state().refusal.clone() {
            return Err(Error::failed_precondition(refusal));
        }
        if self.status.borrow().phase() == Phase::Scheduled {
            let is_first = self.starts() == 0;
            self.called(if is_first { "start" } else { "start again" });
            if self.state().boots_late {
                return match is_first {
                    true => Ok(Response::new(SyncVmiResponse::default())),
                    false => Err(Error::unavailable("the VM is being started")),
                };
            }
            self.change(|status| {
                status.set_phase(Phase::Running);
                status.disks = vec![Disk {
                    name: "root".to_owned(),
                    target: "vda".to_owned(),
                    ..Disk::default()
                }];
                status.disks.extend(drives(&vmi));
                status.interfaces = vec![Interface {
                    name: "default".to_owned(),
                    mac: "02:00:00:00:00:01".to_owned(),
                    addresses: vec!["10.0.0.5".to_owned()],
                    queues: 1,
                    link_up: true,
                    ..Interface::default()
                }];
            });
        } else {
            self.called("sync");
            let _ = self.holds.subscribe().wait_for(|holds| !*holds).await;
            if self.state().vmm_ended {
                return Err(Error::unavailable("the VM is not running"));
            }
            self.plug(&vmi, &request).await;
        }
        let volumes = vmi["spec"]["volumes"].as_array().unwrap();
        let status = self.status.borrow();
        let attached = status.disks.iter().filter(|disk| !disk.is_empty_drive()).count();
        let stays = |disk: &&Disk| disk.plugged && volumes.iter().all(|volume| volume["name"] != disk.name);
        let stays = status.disks.iter().filter(stays);
        let detaching = stays.map(|disk| VolumeStatus {
            name: disk.name.clone(),
            phase: "Detaching".to_owned(),
            reason: "VolumeDetachFailed".to_owned(),
            message: "the guest has locked the tray".to_owned(),
            ..VolumeStatus::default()
        });
        let detaching: Vec<VolumeStatus> = detaching.collect();
        // Its VM was started with another host name and grace period.
        let changed = [
            ("spec.hostname", vmi["spec"]["hostname"] == "changed"),
            (
                "spec.terminationGracePeriodSeconds",
                vmi["spec"]["terminationGracePeriodSeconds"] == 7,
            ),
        ];
        let changed = changed
            .into_iter()
            .filter(|(_, is_other)| request.partial && *is_other);
        let restart_required: Vec<RestartRequired> = changed
            .map(|(field, _)| RestartRequired {
                field: field.to_owned(),
                reason: "restart the VM".to_owned(),
            })
            .collect();
        Ok(Response::new(SyncVmiResponse {
            complete: volumes.len() <= attached && detaching.is_empty(),
            volumes: detaching,
            restart_required,
            ..SyncVmiResponse::default()
        }))
    }

    type ConsoleStream = Answers<ConsoleOutput>;

    /// An echo, and a flood if there is one, until another session begins or the VM ends.
    async fn console(&self, request: Request<Streaming<ConsoleInput>>) -> Answer<Self::ConsoleStream> {
        let mut input = request.into_inner();
        let (sender, receiver) = mpsc::channel(16);
        let (mut status, mut sessions) = (self.status.subscribe(), self.sessions.subscribe());
        self.sessions.send_modify(|session| *session += 1);
        sessions.mark_unchanged();
        let floods = self.state().floods;
        tokio::spawn(async move {
            let ended = loop {
                tokio::select! {
                    Ok(Some(input)) = input.message() => {
                        let output = console_output::Output::Data(input.data);
                        let _ = sender.send(Ok(ConsoleOutput { output: Some(output) })).await;
                    }
                    Ok(permit) = sender.reserve(), if floods => {
                        let output = console_output::Output::Data(vec![b'x'; 4096]);
                        permit.send(Ok(ConsoleOutput { output: Some(output) }));
                    }
                    _ = sessions.changed() => break console_output::Ended::TakenOver,
                    () = succeeded(&mut status) => break console_output::Ended::VmEnded,
                }
            };
            let output = console_output::Output::Ended(ended.into());
            let _ = sender.send(Ok(ConsoleOutput { output: Some(output) })).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    type WatchStatusStream = Answers<Status>;

    async fn watch_status(&self, _: Request<WatchStatusRequest>) -> Answer<Self::WatchStatusStream> {
        let states = WatchStream::new(self.status.subscribe()).map(|status| match status.message.as_str() {
            "killed" => Err(Error::unavailable("killed")),
            _ => Ok(status),
        });
        Ok(Response::new(Box::pin(states)))
    }
}

const NO_AGENT: &str = "no guest agent is connected";

#[tonic::async_trait]
impl Guest for Shim {
    async fn info(&self, _: Request<GuestInfoRequest>) -> Answer<GuestInfoResponse> {
        Ok(Response::new(self.state().guest.clone().unwrap_or_default()))
    }

    async fn exec(&self, _: Request<GuestExecRequest>) -> Answer<GuestExecResponse> {
        Err(Error::unimplemented(""))
    }

    async fn freeze(&self, request: Request<GuestFreezeRequest>) -> Answer<GuestFreezeResponse> {
        let Some(guest) = self.state().guest.clone() else {
            return Err(Error::failed_precondition(NO_AGENT));
        };
        self.called(format!("freeze {:?}", request.into_inner().thaw_seconds));
        self.tell(Some(GuestInfoResponse {
            frozen: Some(true),
            ..guest
        }));
        Ok(Response::new(Default::default()))
    }

    async fn thaw(&self, _: Request<GuestThawRequest>) -> Answer<GuestThawResponse> {
        let Some(guest) = self.state().guest.clone() else {
            return Err(Error::failed_precondition(NO_AGENT));
        };
        self.called("thaw");
        self.tell(Some(GuestInfoResponse {
            frozen: Some(false),
            ..guest
        }));
        Ok(Response::new(GuestThawResponse { was_frozen: true }))
    }
}
