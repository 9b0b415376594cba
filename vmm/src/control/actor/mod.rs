//! The control actor: owns the machine and handles commands and the machine's events, one at a time.

mod watchdog;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use husk_devices::legacy::MachineEvent;
use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::watchdog::Action as WatchdogAction;
use husk_proto::vmm::v1::{self as pb, ExitReason, State};
use husk_seccomp::{ThreadRole, install};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tonic::Status;

use super::config::{self, VmParts};
use super::console::Console;
use super::ports::PortStates;
use super::service::{Reply, VmmCommand, VmmHandle};
use super::{discs, disks, nics, vsock};
use crate::boot::{BootError, KernelSource, LoadedKernel};
use crate::machine::{Callbacks, Machine, SerialEvents, VmEvent, eventfd};
use crate::vcpu::VcpuEvent;

/// The end of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmExit {
    /// Reason.
    pub reason: ExitReason,
    /// Human-readable details.
    pub detail: String,
}

impl VmExit {
    fn new(reason: ExitReason, detail: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
        }
    }

    /// The VMM's exit status, as listed in `vmm.proto`.
    pub fn status(&self) -> u8 {
        match self.reason {
            ExitReason::Poweroff => 0,
            ExitReason::GuestPanic => 10,
            ExitReason::TripleFault => 11,
            ExitReason::BootFailed => 12,
            ExitReason::ControlClosed => 13,
            ExitReason::Watchdog => 14,
            ExitReason::Error | ExitReason::Unspecified => 1,
        }
    }
}

/// Number of commands that may wait.
const MAILBOX_CAPACITY: usize = 16;
/// Number of events that a subscriber may fall behind.
const EVENT_CAPACITY: usize = 64;
/// Maximum time to find and load a kernel, on slow storage too.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// Time after a soft reboot in which a power-off of the guest resets the machine.
const SOFT_REBOOT_WITHIN: Duration = Duration::from_secs(300);

struct RunningVm {
    machine: Machine,
    source: Arc<KernelSource>,
    console: Console,
    /// Action of the watchdog, if there is one.
    watchdog: Option<WatchdogAction>,
}

/// The control actor.
#[derive(Debug)]
pub struct VmmActor {
    mailbox: mpsc::Receiver<VmmCommand>,
    fds: FdReceiver,
    events: broadcast::Sender<pb::Event>,
    machine_events: mpsc::UnboundedReceiver<VmEvent>,
    machine_sender: mpsc::UnboundedSender<VmEvent>,
    alarm: watch::Receiver<Option<Instant>>,
    alarm_sender: watch::Sender<Option<Instant>>,
    watchdog: watch::Receiver<Option<Instant>>,
    watchdog_sender: watch::Sender<Option<Instant>>,
    ports: watch::Sender<PortStates>,
    vsock_sender: mpsc::Sender<pb::VsockRequest>,
    /// Until the monitor reads them.
    vsock_requests: Option<mpsc::Receiver<pb::VsockRequest>>,
    running: Option<RunningVm>,
    state: State,
    booted_from: String,
    boots: u64,
    /// Until then a power-off of the guest resets the machine.
    reboot_until: Option<Instant>,
}

impl std::fmt::Debug for RunningVm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.machine.fmt(f)
    }
}

fn failed(error: impl std::fmt::Display) -> Status {
    Status::internal(error.to_string())
}

fn wrong_state(state: State) -> Status {
    Status::failed_precondition(format!("not possible in state {}", state.as_str_name()))
}

fn now_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // Not with rustix, which looks for the vDSO with a prctl(2) that the seccomp filters forbid.
    // SAFETY: the call writes one timespec. The clock exists, so it does not fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32).as_nanos() as u64
}

pub(super) fn event(kind: Kind) -> pb::Event {
    pb::Event {
        monotonic_ns: now_ns(),
        event: Some(kind),
    }
}

impl VmmActor {
    /// Creates an actor without a machine, which claims descriptors from `fds`.
    pub fn new(fds: FdReceiver) -> (Self, VmmHandle) {
        let (commands, mailbox) = mpsc::channel(MAILBOX_CAPACITY);
        let (machine_sender, machine_events) = mpsc::unbounded_channel();
        let (alarm_sender, alarm) = watch::channel(None);
        let (watchdog_sender, watchdog) = watch::channel(None);
        let (ports, port_states) = watch::channel(PortStates::default());
        let (vsock_sender, vsock_requests) = vsock::requests();
        let actor = Self {
            mailbox,
            fds: fds.clone(),
            events: broadcast::Sender::new(EVENT_CAPACITY),
            machine_events,
            machine_sender,
            alarm,
            alarm_sender,
            watchdog,
            watchdog_sender,
            ports,
            vsock_sender,
            vsock_requests: Some(vsock_requests),
            running: None,
            state: State::Empty,
            booted_from: String::new(),
            boots: 0,
            reboot_until: None,
        };
        let handle = VmmHandle {
            commands,
            fds,
            ports: port_states,
        };
        (actor, handle)
    }

    /// Serves until the VM has ended. Its last event has then been queued, and the event streams end with it.
    pub async fn run(mut self) -> VmExit {
        let exit = loop {
            let due = *self.alarm.borrow_and_update();
            let watchdog_due = *self.watchdog.borrow_and_update();
            let step = tokio::select! {
                command = self.mailbox.recv() => match command {
                    Some(command) => self.handle_command(command).await,
                    None => Some(VmExit::new(ExitReason::ControlClosed, "the monitor closed the control socket")),
                },
                Some(event) = self.machine_events.recv() => self.handle_event(event).await,
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    self.alarm_due();
                    None
                }
                () = sleep_until(watchdog_due.unwrap_or_else(Instant::now)), if watchdog_due.is_some() => {
                    self.watchdog_due().await
                }
                _ = self.alarm.changed() => None,
                _ = self.watchdog.changed() => None,
            };
            if let Some(exit) = step {
                break exit;
            }
        };
        self.end(exit).await
    }

    async fn end(mut self, mut exit: VmExit) -> VmExit {
        if let Some(mut running) = self.running.take() {
            if let Err(error) = running.machine.stop()
                && exit.reason == ExitReason::Poweroff
            {
                exit = VmExit::new(ExitReason::Error, error.to_string());
            }
            running.console.finish().await;
        }
        self.set_state(State::Stopped);
        tracing::info!(
            reason = exit.reason.as_str_name(),
            detail = exit.detail,
            "VM ended"
        );
        let last = pb::event::Exit {
            reason: exit.reason.into(),
            detail: exit.detail.clone(),
        };
        self.emit(Kind::Exit(last));
        exit
    }

    fn emit(&self, kind: Kind) {
        // Fails if there is no subscriber.
        let _ = self.events.send(event(kind));
    }

    fn set_state(&mut self, state: State) {
        if self.state != state {
            self.state = state;
            self.emit(Kind::State(state.into()));
        }
    }

    fn alarm_due(&mut self) {
        self.alarm_sender.send_replace(None);
        if let Some(running) = &self.running {
            running.machine.rtc_alarm();
        }
    }

    /// Handles one command. Returns the exit if the command ends the VM.
    async fn handle_command(&mut self, command: VmmCommand) -> Option<VmExit> {
        match command {
            VmmCommand::Create(config, reply) => {
                let _ = reply.send(self.create(*config).await);
            }
            VmmCommand::Boot { paused, reply } => {
                if self.state != State::Created {
                    let _ = reply.send(Err(wrong_state(self.state)));
                    return None;
                }
                match self.boot(paused).await {
                    Ok(()) => drop(reply.send(Ok(()))),
                    Err(exit) => {
                        let _ = reply.send(Err(Status::failed_precondition(exit.detail.clone())));
                        return Some(exit);
                    }
                }
            }
            VmmCommand::Pause(reply) => drop(reply.send(self.pause())),
            VmmCommand::Resume(reply) => drop(reply.send(self.resume())),
            VmmCommand::Shutdown { reboot, reply } => drop(reply.send(self.shut_down(reboot))),
            VmmCommand::Reset(reply) => {
                if !matches!(self.state, State::Running | State::Paused) {
                    let _ = reply.send(Err(wrong_state(self.state)));
                    return None;
                }
                let exit = self.reset("requested by the monitor").await;
                let _ = reply.send(exit.as_ref().map_or(Ok(()), |e| Err(failed(&e.detail))));
                return exit;
            }
            VmmCommand::Stop(reply) => {
                let _ = reply.send(Ok(()));
                return Some(VmExit::new(ExitReason::Poweroff, "stopped by its monitor"));
            }
            VmmCommand::Info(reply) => self.answer_info(reply),
            VmmCommand::Subscribe(reply) => {
                let present = event(Kind::State(self.state.into()));
                let _ = reply.send(Ok((present, self.events.subscribe())));
            }
            VmmCommand::SetBalloon(bytes, reply) => drop(reply.send(self.set_balloon(bytes))),
            VmmCommand::AddDisk(request, reply) => self.add_disk(*request, reply),
            VmmCommand::RemoveDisk(id, reply) => match self.machine() {
                Ok(machine) => answer(reply, disks::remove(machine.scsi().clone(), id)),
                Err(status) => drop(reply.send(Err(status))),
            },
            VmmCommand::AddNic(setup, reply) => {
                let slot = self
                    .machine_mut()
                    .and_then(|m| m.add_nic(*setup).map_err(|e| nics::status(&e)));
                let _ = reply.send(slot.map(u32::from));
            }
            VmmCommand::RemoveNic(id, reply) => {
                let gone = self
                    .machine_mut()
                    .and_then(|m| m.remove_nic(&id).map_err(|e| nics::status(&e)));
                match gone {
                    Ok(gone) => answer(reply, nics::removed(id, gone)),
                    Err(status) => drop(reply.send(Err(status))),
                }
            }
            VmmCommand::SetLink { id, up, reply } => {
                let machine = self.machine_mut();
                let set = machine.and_then(|m| m.set_link(&id, up).map_err(|e| nics::status(&e)));
                let _ = reply.send(set);
            }
            VmmCommand::ResizeDisk(id, reply) => match self.machine() {
                Ok(machine) => {
                    let (blk, scsi) = (machine.disk(&id).cloned(), machine.scsi().clone());
                    answer(reply, disks::resize(blk, scsi, id));
                }
                Err(status) => drop(reply.send(Err(status))),
            },
            VmmCommand::InsertDisc(disc, reply) => match self.machine() {
                Ok(machine) => answer(
                    reply,
                    discs::insert(self.fds.clone(), machine.scsi().clone(), *disc),
                ),
                Err(status) => drop(reply.send(Err(status))),
            },
            VmmCommand::EjectDisc(id, reply) => match self.machine() {
                Ok(machine) => answer(reply, discs::eject(machine.scsi().clone(), id)),
                Err(status) => drop(reply.send(Err(status))),
            },
            VmmCommand::Vsock(command, reply) => {
                let machine = self.machine();
                let _ = reply.send(machine.and_then(|m| vsock::carry_out(m.vsock(), command)));
            }
            VmmCommand::VsockRequests(reply) => {
                let requests = self.vsock_requests.take();
                let _ =
                    reply.send(requests.ok_or_else(|| Status::failed_precondition("they are read already")));
            }
        }
        None
    }

    async fn create(&mut self, config: pb::VmConfig) -> Result<(), Status> {
        if self.state != State::Empty {
            return Err(wrong_state(self.state));
        }
        let VmParts {
            name,
            host,
            config,
            source,
            console,
            watchdog,
        } = config::parts(config, &self.fds).await?;
        let (output_ready, input_wanted) = (eventfd()?, eventfd()?);
        let serial_events = SerialEvents {
            output_ready: output_ready.try_clone()?,
            input_wanted: input_wanted.try_clone()?,
        };
        let machine = Machine::new(&host, config, self.callbacks(), serial_events).map_err(failed)?;
        let console = Console::spawn(machine.serial().clone(), console, output_ready, input_wanted)
            .map_err(|e| Status::invalid_argument(format!("config.console: {e}")))?;
        // All io_uring rings and KVM descriptors exist now. Install the filter before any guest input is read.
        install(ThreadRole::Control);
        tracing::info!(
            vm = name,
            vcpus = machine.vcpu_count(),
            memory = machine.memory_bytes(),
            "machine created"
        );
        self.running = Some(RunningVm {
            machine,
            source: Arc::new(source),
            console,
            watchdog,
        });
        self.set_state(State::Created);
        Ok(())
    }

    fn callbacks(&self) -> Callbacks {
        let (events, alarm) = (self.machine_sender.clone(), self.alarm_sender.clone());
        let watchdog = self.watchdog_sender.clone();
        let ports = self.ports.clone();
        Callbacks {
            // The queue stays short: each event except the one-time CrashLoaded stops its vCPU, or is the only one of a
            // disk until the machine was paused.
            event: Arc::new(move |e| drop(events.send(e))),
            alarm: Arc::new(move |due| {
                alarm.send_replace(due.map(|d| Instant::now() + d));
            }),
            watchdog: Arc::new(move |due| {
                watchdog.send_replace(due.map(|d| Instant::now() + d));
            }),
            // Not an event of that queue: a guest may open and close ports faster than the monitor reads.
            guest_open: Arc::new(move |name, open| {
                ports.send_if_modified(|states| states.set(name, open));
            }),
            // Nor these, for the same reason.
            vsock_request: vsock::request_fn(self.vsock_sender.clone()),
        }
    }

    async fn boot(&mut self, paused: bool) -> Result<(), VmExit> {
        let error = |e: &dyn std::fmt::Display| VmExit::new(ExitReason::Error, e.to_string());
        let running = self.running.as_mut().ok_or_else(|| error(&"no machine"))?;
        let loader = running.machine.loader().map_err(|e| error(&e))?;
        let source = running.source.clone();
        // On a separate, filtered thread: reading takes time, and the guest controls the image.
        let (done, loaded) = oneshot::channel();
        std::thread::Builder::new()
            .name("boot".into())
            .spawn(move || {
                install(ThreadRole::Boot);
                let result = catch_unwind(AssertUnwindSafe(|| loader.load(&source)));
                let _ = done.send(result.unwrap_or_else(|_| {
                    Err(BootError::NoBootableDisk(
                        "internal error while reading the disk".into(),
                    ))
                }));
            })
            .map_err(|e| error(&e))?;
        // A hostile filesystem may keep its reader busy for ever. The end of the process then ends the reader too.
        let LoadedKernel { entry, description } = timeout(LOAD_TIMEOUT, loaded)
            .await
            .map_err(|_| {
                VmExit::new(
                    ExitReason::BootFailed,
                    format!("no kernel was loaded within {LOAD_TIMEOUT:?}"),
                )
            })?
            .map_err(|_| error(&"boot thread ended"))?
            .map_err(|e| VmExit::new(ExitReason::BootFailed, e.to_string()))?;
        let running = self.running.as_mut().ok_or_else(|| error(&"no machine"))?;
        running.machine.arm(entry).map_err(|e| error(&e))?;
        crate::memory_trim::drop_text_pages();
        if !paused {
            running.machine.run().map_err(|e| error(&e))?;
        }
        self.boots += 1;
        tracing::info!(from = description, boots = self.boots, "booting");
        self.booted_from = description;
        self.set_state(if paused { State::Paused } else { State::Running });
        Ok(())
    }

    fn pause(&mut self) -> Result<(), Status> {
        match (self.state, self.running.as_mut()) {
            (State::Paused, _) => Ok(()),
            (State::Running, Some(running)) => {
                running.machine.pause().map_err(failed)?;
                self.set_state(State::Paused);
                Ok(())
            }
            (state, _) => Err(wrong_state(state)),
        }
    }

    fn resume(&mut self) -> Result<(), Status> {
        match (self.state, self.running.as_mut()) {
            (State::Running, _) => Ok(()),
            (State::Paused, Some(running)) => {
                running.machine.run().map_err(failed)?;
                self.set_state(State::Running);
                Ok(())
            }
            (state, _) => Err(wrong_state(state)),
        }
    }

    /// Presses the power button.
    fn shut_down(&mut self, reboot: bool) -> Result<(), Status> {
        let pressed = match (&self.running, self.state) {
            (Some(running), State::Running | State::Paused) => running.machine.press_power_button(),
            (_, state) => return Err(wrong_state(state)),
        };
        pressed.map_err(failed)?;
        self.reboot_until = reboot.then(|| Instant::now() + SOFT_REBOOT_WITHIN);
        Ok(())
    }

    async fn guest_powered_off(&mut self) -> Option<VmExit> {
        match self.reboot_until {
            Some(until) if Instant::now() < until => self.reset("soft reboot").await,
            _ => Some(VmExit::new(ExitReason::Poweroff, "guest powered off")),
        }
    }

    async fn reset(&mut self, cause: &str) -> Option<VmExit> {
        self.reboot_until = None;
        let running = self.running.as_mut()?;
        if let Err(error) = running.machine.reset() {
            return Some(VmExit::new(ExitReason::Error, error.to_string()));
        }
        // No vCPU has run since: events still queued are from before the reset.
        while self.machine_events.try_recv().is_ok() {}
        self.emit(Kind::Reset(pb::event::Reset {
            cause: cause.to_owned(),
        }));
        tracing::info!(cause, "machine reset");
        self.boot(self.state == State::Paused).await.err()
    }

    async fn handle_event(&mut self, event: VmEvent) -> Option<VmExit> {
        match event {
            VmEvent::Guest(MachineEvent::Poweroff) => self.guest_powered_off().await,
            VmEvent::Guest(MachineEvent::Reset(cause)) => self.reset(cause).await,
            VmEvent::Guest(MachineEvent::Panicked) => {
                Some(VmExit::new(ExitReason::GuestPanic, "guest kernel panicked"))
            }
            VmEvent::Guest(MachineEvent::CrashLoaded) => {
                let message = "guest kernel panicked and runs its crash kernel".to_owned();
                self.emit(Kind::Warning(pb::event::Warning {
                    message,
                    guest_panicked: true,
                }));
                None
            }
            VmEvent::Vcpu(index, VcpuEvent::TripleFault) => Some(VmExit::new(
                ExitReason::TripleFault,
                format!("triple fault on vCPU {index}"),
            )),
            VmEvent::Vcpu(index, VcpuEvent::Failed(text)) => {
                Some(VmExit::new(ExitReason::Error, format!("vCPU {index}: {text}")))
            }
            VmEvent::DiskStopped { disk, error } => self.disk_stopped(disk, error),
            VmEvent::Ejected => {
                if let Some(running) = &mut self.running {
                    running.machine.reap_ejected();
                }
                None
            }
        }
    }

    /// Pauses the VM for a disk that holds failed requests. A resume retries them.
    fn disk_stopped(&mut self, disk: String, message: String) -> Option<VmExit> {
        tracing::warn!(disk, error = message, "I/O error: pausing the VM");
        self.emit(Kind::IoError(pb::event::IoError { disk, message }));
        if self.state != State::Running {
            return None;
        }
        let paused = self.pause();
        paused
            .err()
            .map(|status| VmExit::new(ExitReason::Error, status.message()))
    }

    fn info(&self) -> pb::InfoResponse {
        let machine = self.running.as_ref().map(|r| &r.machine);
        pb::InfoResponse {
            state: self.state.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            guest_memory_bytes: machine.map_or(0, Machine::memory_bytes),
            vcpus: machine.map_or(0, Machine::vcpu_count),
            booted_from: self.booted_from.clone(),
            boots: self.boots,
            console_dropped_bytes: machine.map_or(0, |m| m.serial().dropped()),
            disks: machine.map_or_else(Vec::new, |m| m.disks().map(disks::blk_info).collect()),
            nics: machine.map_or_else(Vec::new, |m| m.nics().map(nics::info).collect()),
            // The guest controls this value, which cannot exceed its memory.
            balloon_bytes: machine.and_then(|m| Some(m.balloon()?.actual().min(m.memory_bytes()))),
        }
    }

    fn machine(&self) -> Result<&Machine, Status> {
        let running = self.running.as_ref().ok_or_else(|| wrong_state(self.state))?;
        Ok(&running.machine)
    }

    fn machine_mut(&mut self) -> Result<&mut Machine, Status> {
        let state = self.state;
        let running = self.running.as_mut().ok_or_else(|| wrong_state(state))?;
        Ok(&mut running.machine)
    }

    fn answer_info(&self, reply: Reply<pb::InfoResponse>) {
        let mut info = self.info();
        let Ok(machine) = self.machine() else {
            return drop(reply.send(Ok(info)));
        };
        let scsi = machine.scsi().clone();
        answer(reply, async move {
            info.disks = disks::list(info.disks, scsi).await;
            Ok(info)
        });
    }

    fn add_disk(&self, request: pb::AddDiskRequest, reply: Reply<pb::AddDiskResponse>) {
        let machine = match self.machine() {
            Ok(machine) => machine,
            Err(status) => return drop(reply.send(Err(status))),
        };
        let id = request.disk.as_ref().and_then(|scsi| scsi.disk.as_ref());
        let id = id.map_or("", |disk| &disk.id);
        if machine.disk(id).is_some() {
            let taken = Status::already_exists(format!("disk {id:?} is a virtio-blk disk"));
            return drop(reply.send(Err(taken)));
        }
        let (fds, scsi) = (self.fds.clone(), machine.scsi().clone());
        answer(reply, disks::add(fds, scsi, request.disk));
    }

    fn set_balloon(&self, bytes: u64) -> Result<(), Status> {
        let machine = self.machine()?;
        let balloon = machine
            .balloon()
            .ok_or_else(|| Status::failed_precondition("the VM has no balloon"))?;
        if bytes > machine.memory_bytes() {
            return Err(Status::invalid_argument("bytes: more than the guest's memory"));
        }
        balloon.set_target(bytes);
        Ok(())
    }
}

/// Answers a command on a task of its own: a slow command must not delay those after it.
fn answer<T: Send + 'static>(
    reply: Reply<T>,
    result: impl Future<Output = Result<T, Status>> + Send + 'static,
) {
    tokio::spawn(async move {
        // Fails if the caller has gone.
        let _ = reply.send(result.await);
    });
}
