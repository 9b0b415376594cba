//! A VMM without a machine. Words in the VM's name select its behaviour: see [`has`].

mod process;
mod saving;
mod vsock;

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use husk_proto::fds::{FdReceiver, Token};
use husk_proto::vmm::v1::event::{Event as Kind, Exit, IoError, Reset, Warning};
use husk_proto::vmm::v1::vmm_server::Vmm;
use husk_proto::vmm::v1::{self as pb, ExitReason, State};
use tokio::sync::{broadcast, mpsc};
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use super::fake_nic::FakeNic;
pub use process::main;
pub use vsock::{ACCEPTS, ASKS, REFUSES};

const USER: i32 = pb::PauseReason::User as i32;
const IO_ERROR: i32 = pb::PauseReason::IoError as i32;
const SNAPSHOT: i32 = pb::PauseReason::Snapshot as i32;

/// True if the VM's name selects this behaviour.
fn has(name: &str, manner: &str) -> bool {
    name.contains(manner)
}

#[derive(Default)]
struct Guest {
    name: String,
    state: State,
    console: Option<UnixStream>,
    ports: Vec<(String, UnixStream)>,
    presses: u32,
    boots: u64,
    disks: HashMap<String, std::fs::File>,
    /// Sizes of the SCSI disks.
    luns: HashMap<String, u32>,
    /// Disks and discs that were added too late once.
    late: HashSet<String>,
    nics: HashMap<String, FakeNic>,
    /// The NICs' slots.
    slots: HashMap<String, u32>,
    /// Eject requests that the guest got.
    eject_requests: u32,
    /// Reasons to be paused.
    pauses: HashSet<i32>,
    /// A save is under way.
    saving: bool,
    /// The file of the last save, until a resume after it.
    memory: Option<std::fs::File>,
    /// A resume after a snapshot has failed.
    stuttered: bool,
}

struct Fake {
    fds: FdReceiver,
    events: broadcast::Sender<pb::Event>,
    guest: Arc<Mutex<Guest>>,
    ended: mpsc::Sender<i32>,
    vsock: broadcast::Sender<pb::VsockRequest>,
    /// Connections that made the guest ask.
    asking: Mutex<Vec<UnixStream>>,
}

impl Fake {
    fn tell(&self, kind: Kind) {
        let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let monotonic_ns = clock.tv_sec as u64 * 1_000_000_000 + clock.tv_nsec as u64;
        let _ = self.events.send(pb::Event {
            monotonic_ns,
            event: Some(kind),
        });
    }

    fn enter(&self, state: State) {
        self.guest.lock().unwrap().state = state;
        self.tell(Kind::State(state.into()));
    }

    fn name(&self) -> String {
        self.guest.lock().unwrap().name.clone()
    }

    fn say(&self, text: &str) {
        if let Some(console) = &mut self.guest.lock().unwrap().console {
            let _ = console.write_all(text.as_bytes());
        }
    }

    fn end(&self, reason: ExitReason, detail: &str, code: i32) {
        self.tell(Kind::Exit(Exit {
            reason: reason.into(),
            detail: detail.into(),
        }));
        let ended = self.ended.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(30)).await;
            let _ = ended.send(code).await;
        });
    }

    /// Says which ports the monitor has open.
    fn say_ports(&self) {
        let mut text = String::new();
        for (name, stream) in &mut self.guest.lock().unwrap().ports {
            // The monitor sends nothing.
            let open = stream
                .read(&mut [0])
                .is_err_and(|e| e.kind() == ErrorKind::WouldBlock);
            text += &format!("port {name} {}\n", if open { "open" } else { "closed" });
        }
        self.say(&text);
    }

    async fn take(&self, fd: &pb::Fd) -> Result<std::fs::File, Status> {
        let token = Token::try_from(fd).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let fd = self.fds.take(token).await;
        Ok(fd.map_err(|e| Status::failed_precondition(e.to_string()))?.into())
    }

    /// Takes a NIC's descriptors, and lets the guest request an address over it unless its link is down.
    async fn plug(&self, nic: &pb::Nic) -> Result<(), Status> {
        let mut taps = Vec::new();
        for tap in &nic.taps {
            taps.push(self.take(tap).await?);
        }
        for vhost in &nic.vhost {
            self.take(vhost).await?;
        }
        self.say(&format!(
            "nic {} {:02x?} mtu {} queues {}{}{}\n",
            nic.id,
            nic.mac,
            nic.mtu,
            taps.len(),
            if nic.link_down { " down" } else { "" },
            match nic.pci_slot {
                0 => String::new(),
                slot => format!(" slot {slot}"),
            }
        ));
        let console = self
            .guest
            .lock()
            .unwrap()
            .console
            .as_ref()
            .map(|c| c.try_clone().unwrap());
        let fake = FakeNic::plug(nic, taps, console);
        self.guest.lock().unwrap().nics.insert(nic.id.clone(), fake);
        Ok(())
    }

    /// The monitor has given the first request for a disk up.
    fn check_in_time(&self, id: &str) -> Result<(), Status> {
        let late = has(&self.name(), "adds-late") && self.guest.lock().unwrap().late.insert(id.to_owned());
        match late {
            true => Err(Status::deadline_exceeded("it takes long")),
            false => Ok(()),
        }
    }

    /// Keeps a disk open, as husk-vmm does, and returns its size.
    fn keep(&self, id: &str, file: std::fs::File) -> Result<u64, Status> {
        let size = file.metadata()?.len();
        self.guest.lock().unwrap().disks.insert(id.to_owned(), file);
        Ok(size)
    }
}

#[tonic::async_trait]
impl Vmm for Fake {
    type EventsStream = std::pin::Pin<Box<dyn Stream<Item = Result<pb::Event, Status>> + Send>>;
    type PrecopyStream = std::pin::Pin<Box<dyn Stream<Item = Result<pb::SaveProgress, Status>> + Send>>;
    type SaveStream = std::pin::Pin<Box<dyn Stream<Item = Result<pb::SaveProgress, Status>> + Send>>;
    type VsockRequestsStream = std::pin::Pin<Box<dyn Stream<Item = Result<pb::VsockRequest, Status>> + Send>>;

    async fn create(
        &self,
        request: Request<pb::CreateRequest>,
    ) -> Result<Response<pb::CreateResponse>, Status> {
        let pb::CreateRequest { config, saved } = request.into_inner();
        let config = config.unwrap();
        if has(&config.name, "refused") {
            return Err(Status::invalid_argument("config.memory: too much of it"));
        }
        if has(&config.name, "dies-early") {
            eprintln!(r#"{{"level":"ERROR","fields":{{"message":"out of luck"}}}}"#);
            std::process::exit(1);
        }
        if has(&config.name, "hangs") {
            std::future::pending::<()>().await;
        }
        if has(&config.name, "slow") {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        self.guest.lock().unwrap().name.clone_from(&config.name);
        self.take(config.kvm.as_ref().unwrap()).await?;
        if let Some(console) = &config.console {
            let fd = self.fds.take(Token::try_from(console).unwrap()).await.unwrap();
            let console = UnixStream::from(fd);
            console.set_nonblocking(false)?;
            self.guest.lock().unwrap().console = Some(console.try_clone()?);
            std::thread::spawn(move || std::io::copy(&mut console.try_clone().unwrap(), &mut { console }));
        }
        for port in &config.ports {
            let stream = self.take(port.stream.as_ref().unwrap()).await?;
            let stream = UnixStream::from(OwnedFd::from(stream));
            stream.set_nonblocking(true)?;
            self.guest.lock().unwrap().ports.push((port.name.clone(), stream));
        }
        let mut sizes = Vec::new();
        for scsi in &config.scsi_disks {
            let id = scsi.disk.as_ref().unwrap().id.clone();
            self.guest.lock().unwrap().luns.insert(id, scsi.lun.unwrap());
        }
        let scsi = config.scsi_disks.iter().filter_map(|scsi| scsi.disk.as_ref());
        for disk in config.disks.iter().chain(scsi) {
            // An empty CD-ROM drive has none.
            let Some(file) = &disk.file else { continue };
            let file = self.take(file).await?;
            if let Some(base) = &disk.base {
                let base = self.take(base).await?;
                if has(&config.name, "picky") {
                    let reason = format!("qcow2: {} bytes are no image", base.metadata()?.len());
                    let disk = disk.id.clone();
                    return Err(pb::DiskFault { disk, reason }.to_status("config.disks[0]: no good"));
                }
            }
            sizes.push(self.keep(&disk.id, file)?);
        }
        self.say(&format!(
            "{} disks of {} bytes\n",
            sizes.len(),
            sizes.iter().sum::<u64>()
        ));
        for (slot, nic) in (1..).zip(&config.nics) {
            self.plug(nic).await?;
            let slot = if nic.pci_slot == 0 { slot } else { nic.pci_slot };
            self.guest.lock().unwrap().slots.insert(nic.id.clone(), slot);
        }
        if let Some(saved) = saved {
            self.go_on(saved).await?;
        }
        self.enter(State::Created);
        Ok(Response::new(pb::CreateResponse {}))
    }

    async fn boot(&self, request: Request<pb::BootRequest>) -> Result<Response<pb::BootResponse>, Status> {
        if has(&self.name(), "no-kernel") {
            self.end(ExitReason::BootFailed, "disk data: no partition table", 12);
            return Err(Status::failed_precondition("disk data: no partition table"));
        }
        self.check_boot()?;
        self.guest.lock().unwrap().boots = 1;
        self.say_ports();
        if request.into_inner().paused {
            self.guest.lock().unwrap().pauses.insert(USER);
            self.enter(State::Paused);
        } else {
            self.enter(State::Running);
        }
        self.tell(Kind::Warning(Warning {
            message: "this is a play".into(),
            guest_panicked: false,
        }));
        if has(&self.name(), "panics") {
            self.end(ExitReason::GuestPanic, "guest kernel panicked", 10);
        }
        Ok(Response::new(pb::BootResponse {}))
    }

    async fn pause(&self, request: Request<pb::PauseRequest>) -> Result<Response<pb::PauseResponse>, Status> {
        let reason = request.into_inner().reason.max(USER);
        let first = {
            let pauses = &mut self.guest.lock().unwrap().pauses;
            pauses.insert(reason);
            pauses.len() == 1
        };
        if first {
            self.enter(State::Paused);
        }
        Ok(Response::new(pb::PauseResponse {}))
    }

    async fn resume(
        &self,
        request: Request<pb::ResumeRequest>,
    ) -> Result<Response<pb::ResumeResponse>, Status> {
        let reason = request.into_inner().reason.max(USER);
        {
            let mut guest = self.guest.lock().unwrap();
            if guest.saving {
                return Err(Status::failed_precondition("the VM is being saved"));
            }
            if reason == SNAPSHOT
                && has(&guest.name, "stutters")
                && !std::mem::replace(&mut guest.stuttered, true)
            {
                return Err(Status::internal("a vCPU does not run"));
            }
            if reason == SNAPSHOT {
                guest.pauses.remove(&SNAPSHOT);
                guest.end_save()?;
            } else if reason == IO_ERROR {
                if guest.pauses.iter().any(|pause| *pause != IO_ERROR) {
                    return Err(Status::failed_precondition(
                        "the VM is paused for another reason too",
                    ));
                }
                guest.pauses.clear();
            } else if guest.pauses.contains(&SNAPSHOT) {
                return Err(Status::failed_precondition("the VM is paused for a snapshot"));
            } else {
                guest.pauses.clear();
            }
            if !guest.pauses.is_empty() {
                return Ok(Response::new(pb::ResumeResponse {}));
            }
        }
        self.enter(State::Running);
        let full = has(&self.name(), "full") || has(&self.name(), "fills") && reason == USER;
        if full {
            self.tell(Kind::IoError(IoError {
                disk: "data".into(),
                message: "no space left".into(),
            }));
            self.guest.lock().unwrap().pauses.insert(IO_ERROR);
            self.enter(State::Paused);
        }
        Ok(Response::new(pb::ResumeResponse {}))
    }

    async fn precopy(
        &self,
        request: Request<pb::PrecopyRequest>,
    ) -> Result<Response<Self::PrecopyStream>, Status> {
        let progress = self.precopy_file(request.into_inner()).await?;
        Ok(Response::new(Box::pin(progress)))
    }

    async fn save(&self, request: Request<pb::SaveRequest>) -> Result<Response<Self::SaveStream>, Status> {
        let progress = self.save_files(request.into_inner()).await?;
        Ok(Response::new(Box::pin(progress)))
    }

    async fn shutdown(
        &self,
        request: Request<pb::ShutdownRequest>,
    ) -> Result<Response<pb::ShutdownResponse>, Status> {
        let reboot = request.into_inner().reboot;
        if reboot && has(&self.name(), "dawdles") {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let (name, awake) = {
            let mut guest = self.guest.lock().unwrap();
            guest.presses += 1;
            (guest.name.clone(), guest.state == State::Running)
        };
        self.say("power button\n");
        if awake && !has(&name, "deaf") {
            if reboot {
                self.tell(Kind::Reset(Reset {
                    cause: "soft reboot".into(),
                }));
            } else {
                self.end(ExitReason::Poweroff, "guest powered off", 0);
            }
        }
        Ok(Response::new(pb::ShutdownResponse {}))
    }

    async fn reset(&self, _: Request<pb::ResetRequest>) -> Result<Response<pb::ResetResponse>, Status> {
        self.guest.lock().unwrap().boots += 1;
        self.say_ports();
        self.tell(Kind::Reset(Reset {
            cause: "requested by the monitor".into(),
        }));
        Ok(Response::new(pb::ResetResponse {}))
    }

    async fn stop(&self, _: Request<pb::StopRequest>) -> Result<Response<pb::StopResponse>, Status> {
        if !has(&self.name(), "stubborn") {
            self.end(ExitReason::Poweroff, "stopped by its monitor", 0);
        }
        Ok(Response::new(pb::StopResponse {}))
    }

    async fn info(&self, _: Request<pb::InfoRequest>) -> Result<Response<pb::InfoResponse>, Status> {
        let (boots, state, slots) = {
            let guest = self.guest.lock().unwrap();
            (guest.boots, guest.state, guest.slots.clone())
        };
        let ejectable = !has(&self.name(), "undescribed");
        let nics = slots.into_iter().map(|(id, pci_slot)| pb::NicInfo {
            id,
            pci_slot,
            ejectable,
            ..Default::default()
        });
        Ok(Response::new(pb::InfoResponse {
            state: state.into(),
            booted_from: "a play".into(),
            boots,
            nics: nics.collect(),
            ..Default::default()
        }))
    }

    async fn events(&self, _: Request<pb::EventsRequest>) -> Result<Response<Self::EventsStream>, Status> {
        let events = BroadcastStream::new(self.events.subscribe()).filter_map(|event| Some(Ok(event.ok()?)));
        Ok(Response::new(Box::pin(events)))
    }

    async fn set_balloon(
        &self,
        _: Request<pb::SetBalloonRequest>,
    ) -> Result<Response<pb::SetBalloonResponse>, Status> {
        Err(Status::unimplemented("no balloon"))
    }

    async fn add_disk(
        &self,
        request: Request<pb::AddDiskRequest>,
    ) -> Result<Response<pb::AddDiskResponse>, Status> {
        let scsi = request.into_inner().disk.unwrap();
        let disk = scsi.disk.unwrap();
        let file = self.take(disk.file.as_ref().unwrap()).await?;
        if has(&self.name(), "full") {
            return Err(Status::resource_exhausted("too many disks"));
        }
        assert_eq!(scsi.lun, None, "the VMM chooses it");
        let size = self.keep(&disk.id, file)?;
        // If the guest does not release devices, the first two are not free.
        let first = if has(&self.name(), "clings") { 2 } else { 0 };
        let lun = {
            let luns = &mut self.guest.lock().unwrap().luns;
            let lun = (first..)
                .find(|lun| !luns.values().any(|used| used == lun))
                .unwrap();
            luns.insert(disk.id.clone(), lun);
            lun
        };
        self.say(&format!(
            "added {} {} at {}:{lun} of {size} bytes\n",
            disk.id, disk.serial, scsi.target
        ));
        self.check_in_time(&disk.id)?;
        let address = Some(pb::ScsiAddress {
            controller: 0,
            target: scsi.target,
            lun,
        });
        Ok(Response::new(pb::AddDiskResponse { address }))
    }

    async fn remove_disk(
        &self,
        request: Request<pb::RemoveDiskRequest>,
    ) -> Result<Response<pb::RemoveDiskResponse>, Status> {
        let id = request.into_inner().id;
        // A paused guest releases no device.
        while self.guest.lock().unwrap().state == State::Paused {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.guest.lock().unwrap().luns.remove(&id);
        let removed = self.guest.lock().unwrap().disks.remove(&id);
        let flush_error = if has(&self.name(), "loses") {
            "it is lost"
        } else {
            ""
        };
        removed
            .map(|_| {
                Response::new(pb::RemoveDiskResponse {
                    flush_error: flush_error.into(),
                })
            })
            .ok_or_else(|| Status::not_found("there is no such disk"))
    }

    async fn resize_disk(
        &self,
        request: Request<pb::ResizeDiskRequest>,
    ) -> Result<Response<pb::ResizeDiskResponse>, Status> {
        let id = request.into_inner().id;
        let bytes = self.guest.lock().unwrap().disks[&id].metadata()?.len();
        self.say(&format!("{id} has {bytes} bytes now\n"));
        Ok(Response::new(pb::ResizeDiskResponse { bytes }))
    }

    async fn insert_disc(
        &self,
        request: Request<pb::InsertDiscRequest>,
    ) -> Result<Response<pb::InsertDiscResponse>, Status> {
        let disc = request.into_inner().disc.unwrap();
        let file = self.take(disc.file.as_ref().unwrap()).await?;
        assert!(disc.read_only && self.guest.lock().unwrap().luns.contains_key(&disc.id));
        if self.guest.lock().unwrap().disks.contains_key(&disc.id) {
            return Err(Status::already_exists("the drive has a disc"));
        }
        let bytes = self.keep(&disc.id, file)?;
        self.check_in_time(&disc.id)?;
        self.say(&format!("inserted {} of {bytes} bytes\n", disc.id));
        Ok(Response::new(pb::InsertDiscResponse { bytes }))
    }

    async fn eject_disc(
        &self,
        request: Request<pb::EjectDiscRequest>,
    ) -> Result<Response<pb::EjectDiscResponse>, Status> {
        let id = request.into_inner().id;
        let (name, mut guest) = (self.name(), self.guest.lock().unwrap());
        guest.eject_requests += 1;
        // A guest unlocks its tray after some requests, or never.
        if has(&name, "never-unlocks") || has(&name, "late-unlocks") && guest.eject_requests < 3 {
            return Err(Status::failed_precondition("the guest has locked the tray"));
        }
        guest.disks.remove(&id);
        Ok(Response::new(pb::EjectDiscResponse {}))
    }

    async fn add_nic(
        &self,
        request: Request<pb::AddNicRequest>,
    ) -> Result<Response<pb::AddNicResponse>, Status> {
        let nic = request.into_inner().nic.unwrap();
        if has(&self.name(), "full") {
            return Err(Status::resource_exhausted("no slot is free"));
        }
        self.plug(&nic).await?;
        let pci_slot = if nic.pci_slot == 0 { 24 } else { nic.pci_slot };
        Ok(Response::new(pb::AddNicResponse { pci_slot }))
    }

    async fn remove_nic(
        &self,
        request: Request<pb::RemoveNicRequest>,
    ) -> Result<Response<pb::RemoveNicResponse>, Status> {
        let id = request.into_inner().id;
        self.say(&format!("asked for {id}\n"));
        // A paused guest releases no device.
        if self.guest.lock().unwrap().state == State::Paused || has(&self.name(), "clings") {
            return Err(Status::deadline_exceeded("the guest has not let go"));
        }
        let removed = self.guest.lock().unwrap().nics.remove(&id);
        removed
            .map(|_| Response::new(pb::RemoveNicResponse {}))
            .ok_or_else(|| Status::not_found("there is no such NIC"))
    }

    async fn set_link(
        &self,
        request: Request<pb::SetLinkRequest>,
    ) -> Result<Response<pb::SetLinkResponse>, Status> {
        let pb::SetLinkRequest { id, up } = request.into_inner();
        if has(&self.name(), "no-cable") {
            return Err(Status::failed_precondition("there is no cable"));
        }
        self.say(&format!("link of {id} {up}\n"));
        Ok(Response::new(pb::SetLinkResponse {}))
    }

    async fn connect_vsock(
        &self,
        request: Request<pb::ConnectVsockRequest>,
    ) -> Result<Response<pb::ConnectVsockResponse>, Status> {
        self.connect(request.into_inner()).await
    }

    async fn vsock_requests(
        &self,
        _: Request<pb::VsockRequestsRequest>,
    ) -> Result<Response<Self::VsockRequestsStream>, Status> {
        let requests = BroadcastStream::new(self.vsock.subscribe());
        Ok(Response::new(Box::pin(
            requests.filter_map(|request| Some(Ok(request.ok()?))),
        )))
    }

    async fn answer_vsock(
        &self,
        request: Request<pb::AnswerVsockRequest>,
    ) -> Result<Response<pb::AnswerVsockResponse>, Status> {
        self.answer(request.into_inner()).await
    }
}
