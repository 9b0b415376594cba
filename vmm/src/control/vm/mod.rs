//! The VM, on the machine's thread: handles the monitor's commands and the machine's events, one at a time.
//!
//! The gRPC service, the console and the clocks are on the runtime's thread, and never wait for the machine.

mod boot;
mod deferred_pause;
mod deferred_reset;
mod exit;
mod mailbox;
mod pause;
mod power_events;
mod precopy;
mod reboot;
mod saved;
mod stopped_disks;
#[cfg(test)]
mod testing;
mod watchdog;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak, mpsc};
use std::time::Instant;

use husk_devices::legacy::MachineEvent;
use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::watchdog::Action as WatchdogAction;
use husk_proto::vmm::v1::{self as pb, ExitReason, PauseReason, State};
use husk_seccomp::{ThreadRole, install};
use husk_virtio_scsi::ScsiHandle;
use tokio::runtime::Handle;
use tokio::sync::{mpsc as tokio_mpsc, oneshot, watch};
use tonic::Status;

use super::clocks::{self, SetTimer, Timer};
use super::config::VmParts;
use super::console::Console;
use super::disks::{self, MachineDisks};
use super::events::{Events, event};
use super::ports::PortStates;
use super::saved::SavedVm;
use super::service::{Reply, VmmCommand};
use super::{nics, vsock};
use crate::boot::KernelSource;
use crate::machine::{Callbacks, Machine, SerialEvents, VmEvent, eventfd};
use crate::vcpu::VcpuEvent;
pub use exit::VmExit;
use mailbox::Mailbox;
pub(super) use mailbox::Message;
use pause::PauseReasons;
use precopy::Precopy;
use reboot::SoftReboot;

struct RunningVm {
    machine: Machine,
    source: Arc<KernelSource>,
    console: Console,
    /// Action of the watchdog, if there is one.
    watchdog: Option<WatchdogAction>,
    /// Origin of the kernel of a restored machine, until it goes on.
    restored: Option<String>,
}

impl std::fmt::Debug for RunningVm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.machine.fmt(f)
    }
}

/// The VM's state on the machine's thread.
#[derive(Debug)]
struct Vm {
    mailbox: Mailbox,
    messages: mpsc::Sender<Message>,
    /// The runtime of the first thread, which runs the console's task.
    runtime: Handle,
    events: Events,
    callbacks: Callbacks,
    /// Until the monitor reads them.
    vsock_requests: Option<tokio_mpsc::Receiver<pb::VsockRequest>>,
    running: Option<RunningVm>,
    state: State,
    /// Empty unless the VM is paused.
    pause_reasons: PauseReasons,
    /// Reasons for which a VM that runs is to be paused, as soon as its vCPUs can be.
    deferred_pauses: PauseReasons,
    /// Cause for which the machine is to be reset, as soon as its vCPUs can be stopped. It makes a pause void.
    deferred_reset: Option<&'static str>,
    retry: Timer,
    /// Disks that hold failed requests, with the first error of each. A resume retries the requests.
    stopped_disks: BTreeMap<String, String>,
    power_repeat: Timer,
    /// Number of times that the interrupt of power events may be raised again.
    power_repeats_left: u32,
    /// Alive while the VM is being saved.
    saving: Weak<()>,
    /// Until a save or a resume follows it.
    precopy: Option<Precopy>,
    booted_from: String,
    boots: u64,
    soft_reboot: SoftReboot,
    /// Time at which the watchdog pressed the power button last.
    watchdog_pressed: Option<Instant>,
}

/// A VM that has ended, without its machine.
#[derive(Debug)]
pub(super) struct EndedVm {
    exit: VmExit,
    console: Option<Console>,
    events: Events,
}

impl EndedVm {
    /// Writes the console's last output and sends the last event. Runs on the runtime of the console.
    pub(super) async fn finish(self) -> VmExit {
        if let Some(console) = self.console {
            console.finish().await;
        }
        self.events.end(&self.exit);
        self.exit
    }
}

fn failed(error: impl std::fmt::Display) -> Status {
    Status::internal(error.to_string())
}

fn wrong_state(state: State) -> Status {
    Status::failed_precondition(format!("not possible in state {}", state.as_str_name()))
}

fn stopped(reply: Reply<()>) -> VmExit {
    let _ = reply.send(Ok(()));
    VmExit::new(ExitReason::Poweroff, "stopped by its monitor")
}

fn control_closed() -> VmExit {
    VmExit::new(ExitReason::ControlClosed, "the monitor is gone")
}

/// The machine's thread, from outside.
#[derive(Debug)]
pub(super) struct MachineThread {
    /// For messages to it.
    pub messages: mpsc::Sender<Message>,
    /// States of the console device's ports.
    pub ports: watch::Receiver<PortStates>,
    /// Answered when the VM has ended.
    pub ended: oneshot::Receiver<EndedVm>,
}

/// Starts the machine's thread. Must be called on a runtime, where the console and the clocks run.
///
/// # Errors
/// The kernel refuses a thread.
pub(super) fn spawn() -> std::io::Result<MachineThread> {
    let (ports, port_states) = watch::channel(PortStates::default());
    let vm = Vm::new(ports);
    let messages = vm.messages.clone();
    let (end, ended) = oneshot::channel();
    std::thread::Builder::new()
        .name("machine".into())
        .spawn(move || drop(end.send(vm.run())))?;
    Ok(MachineThread {
        messages,
        ports: port_states,
        ended,
    })
}

/// A timer that sends a message to the machine's thread.
fn timer(messages: &mpsc::Sender<Message>, ring: fn() -> Message) -> SetTimer {
    let messages = messages.clone();
    clocks::timer(move || drop(messages.send(ring())))
}

/// The callbacks of the machine's threads.
fn callbacks(
    messages: &mpsc::Sender<Message>,
    ports: watch::Sender<PortStates>,
    vsock_sender: tokio_mpsc::Sender<pb::VsockRequest>,
) -> Callbacks {
    let events = messages.clone();
    Callbacks {
        // The queue stays short: each event except the one-time CrashLoaded stops its vCPU, or is the only one of a
        // disk's queue until the machine was paused.
        event: Arc::new(move |event| drop(events.send(Message::Event(event)))),
        alarm: timer(messages, || Message::RtcAlarm),
        watchdog: timer(messages, || Message::WatchdogAlarm),
        // Not an event of that queue: a guest may open and close ports faster than the monitor reads.
        guest_open: Arc::new(move |name, open| {
            ports.send_if_modified(|states| states.set(name, open));
        }),
        // Nor these, for the same reason.
        vsock_request: vsock::request_fn(vsock_sender),
    }
}

impl Vm {
    /// A VM without a machine.
    fn new(ports: watch::Sender<PortStates>) -> Self {
        let (messages, mailbox) = Mailbox::new();
        let (vsock_sender, vsock_requests) = vsock::requests();
        Vm {
            mailbox,
            runtime: Handle::current(),
            events: Events::new(),
            callbacks: callbacks(&messages, ports, vsock_sender),
            vsock_requests: Some(vsock_requests),
            running: None,
            state: State::Empty,
            pause_reasons: PauseReasons::default(),
            deferred_pauses: PauseReasons::default(),
            deferred_reset: None,
            retry: Timer(timer(&messages, || Message::Retry)),
            stopped_disks: BTreeMap::new(),
            power_repeat: Timer(timer(&messages, || Message::PowerRepeat)),
            power_repeats_left: 0,
            saving: Weak::new(),
            precopy: None,
            booted_from: String::new(),
            boots: 0,
            soft_reboot: SoftReboot::No,
            watchdog_pressed: None,
            messages,
        }
    }

    /// Serves until the VM has ended.
    fn run(mut self) -> EndedVm {
        let exit = loop {
            let step = match self.mailbox.next() {
                Some(Message::Command(command)) => self.handle_command(command),
                Some(Message::Event(event)) => self.handle_event(event),
                Some(Message::RtcAlarm) => {
                    self.running
                        .iter()
                        .for_each(|running| running.machine.rtc_alarm());
                    None
                }
                Some(Message::WatchdogAlarm) => self.watchdog_due(),
                Some(Message::Retry) if self.deferred_reset.is_some() => self.retry_deferred_reset(),
                Some(Message::Retry) => self.retry_deferred_pause(),
                Some(Message::PowerRepeat) => {
                    self.power_repeat_due();
                    None
                }
                // `boot` takes it. A boot that gives up waiting ends the VM.
                Some(Message::Loaded(_)) => None,
                Some(Message::ControlClosed) | None => Some(control_closed()),
            };
            if let Some(exit) = step {
                break exit;
            }
        };
        self.end(exit)
    }

    fn end(mut self, mut exit: VmExit) -> EndedVm {
        self.stop_precopy();
        let console = self.running.take().map(|mut running| {
            if let Err(error) = running.machine.stop()
                && exit.reason == ExitReason::Poweroff
            {
                exit = VmExit::error(error);
            }
            running.console
        });
        EndedVm {
            exit,
            console,
            events: self.events,
        }
    }

    fn set_state(&mut self, state: State) {
        if self.state != state {
            self.state = state;
            match state {
                State::Running => {
                    self.stopped_disks.clear();
                    self.repeat_power_events();
                    self.soft_reboot.resume(Instant::now());
                }
                _ => self.soft_reboot.pause(Instant::now()),
            }
            self.events.emit(Kind::State(state.into()));
        }
    }

    /// Handles one command. Returns the exit if the command ends the VM. A caller that has gone gets no answer.
    fn handle_command(&mut self, command: VmmCommand) -> Option<VmExit> {
        match command {
            VmmCommand::Create(parts, reply) => drop(reply.send(self.create(*parts))),
            VmmCommand::Boot { paused, reply } => {
                if self.state != State::Created {
                    let _ = reply.send(Err(wrong_state(self.state)));
                    return None;
                }
                let restored = self.running.as_ref().is_some_and(|vm| vm.restored.is_some());
                match self.boot(paused) {
                    Ok(()) => drop(reply.send(Ok(()))),
                    Err(exit) => {
                        let ran = restored && self.machine().is_ok_and(|machine| !machine.is_paused());
                        let _ = reply.send(Err(boot::refusal(&exit, ran)));
                        return Some(exit);
                    }
                }
            }
            VmmCommand::Pause(reason, reply) => drop(reply.send(self.pause(reason))),
            VmmCommand::Resume(reason, reply) => drop(reply.send(self.resume(reason))),
            VmmCommand::StartPrecopy(reply) => drop(reply.send(self.start_precopy())),
            VmmCommand::NextPass { gate, reply } => drop(reply.send(self.next_pass(gate))),
            VmmCommand::EndPrecopy {
                gate,
                complete,
                reply,
            } => drop(reply.send(self.passes_ended(&gate, complete))),
            VmmCommand::Save { precopied, reply } => drop(reply.send(self.save(precopied))),
            VmmCommand::Shutdown { reboot, reply } => drop(reply.send(self.shut_down(reboot))),
            VmmCommand::Reset(reply) => {
                let possible = match self.state {
                    State::Running | State::Paused => self.check_not_saving(),
                    state => Err(wrong_state(state)),
                };
                if let Err(status) = possible {
                    let _ = reply.send(Err(status));
                    return None;
                }
                let (answer, exit) = match self.reset("requested by the monitor") {
                    Ok(None) => (Ok(()), None),
                    Ok(Some(exit)) => (Err(failed(&exit.detail)), Some(exit)),
                    Err(error) => (Err(failed(error)), None),
                };
                let _ = reply.send(answer);
                return exit;
            }
            VmmCommand::Stop(reply) => return Some(stopped(reply)),
            VmmCommand::Info(reply) => drop(reply.send(Ok(self.info()))),
            VmmCommand::Subscribe(reply) => {
                let _ = reply.send(Ok((self.present(), self.events.subscribe())));
            }
            VmmCommand::SetBalloon(bytes, reply) => drop(reply.send(self.set_balloon(bytes))),
            VmmCommand::Disks(reply) => {
                let disks = self.machine().map(|machine| MachineDisks {
                    blk: machine.disks().cloned().collect(),
                    scsi: machine.scsi().clone(),
                });
                let _ = reply.send(disks);
            }
            VmmCommand::AddNic(setup, slot, reply) => {
                // Its vhost would not have the log.
                let slot = self
                    .check_not_copied()
                    .and_then(|()| self.machine_mut())
                    .and_then(|m| m.add_nic(*setup, slot).map_err(|e| nics::status(&e)));
                self.repeat_power_events();
                let _ = reply.send(slot.map(u32::from));
            }
            VmmCommand::RemoveNic(id, reply) => {
                let gone = self
                    .machine_mut()
                    .and_then(|m| m.remove_nic(&id).map_err(|e| nics::status(&e)));
                self.repeat_power_events();
                let _ = reply.send(gone);
            }
            // Its caller has recorded that the link stays as it was.
            VmmCommand::SetLink { reply, .. } if reply.is_closed() => {}
            VmmCommand::SetLink { id, up, reply } => {
                let machine = self.machine_mut();
                let set = machine.and_then(|m| m.set_link(&id, up).map_err(|e| nics::status(&e)));
                let _ = reply.send(set);
            }
            VmmCommand::Vsock(command, reply) => {
                let machine = self.machine();
                let _ = reply.send(machine.and_then(|m| vsock::execute(m.vsock(), command)));
            }
            VmmCommand::VsockRequests(reply) => {
                let requests = self.vsock_requests.take();
                let _ =
                    reply.send(requests.ok_or_else(|| Status::failed_precondition("they are read already")));
            }
        }
        None
    }

    fn create(&mut self, parts: VmParts) -> Result<(), Status> {
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
            saved,
        } = parts;
        let (output_ready, input_wanted) = (eventfd()?, eventfd()?);
        let serial_events = SerialEvents {
            output_ready: output_ready.try_clone()?,
            input_wanted: input_wanted.try_clone()?,
        };
        let callbacks = self.callbacks.clone();
        let mut soft_reboot = SoftReboot::No;
        let (machine, restored) = match saved {
            None => (Machine::new(&host, config, callbacks, serial_events), None),
            Some((
                SavedVm {
                    booted_from,
                    soft_reboot_left,
                    machine,
                    ..
                },
                memory,
            )) => {
                soft_reboot = SoftReboot::restored(soft_reboot_left);
                let from = (machine, memory);
                let restored = Machine::restore(&host, config, from, callbacks, serial_events);
                (restored, Some(booted_from))
            }
        };
        let machine = machine.map_err(|e| Status::internal(saved::error_chain(&e)))?;
        let console = {
            let _runtime = self.runtime.enter();
            Console::spawn(machine.serial().clone(), console, output_ready, input_wanted)
        };
        let console = console.map_err(|e| Status::invalid_argument(format!("config.console: {e}")))?;
        // All io_uring rings and KVM descriptors exist now. Install the filter before any guest input is read.
        install(ThreadRole::Machine);
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
            restored,
        });
        self.soft_reboot = soft_reboot;
        self.set_state(State::Created);
        Ok(())
    }

    /// Presses the power button.
    fn shut_down(&mut self, reboot: bool) -> Result<(), Status> {
        let pressed = match (&self.running, self.state) {
            (Some(running), State::Running | State::Paused) => running.machine.press_power_button(),
            (_, state) => return Err(wrong_state(state)),
        };
        pressed.map_err(failed)?;
        self.repeat_power_events();
        self.soft_reboot = match reboot {
            true => SoftReboot::pressed(),
            false => SoftReboot::No,
        };
        if self.state == State::Running {
            self.soft_reboot.resume(Instant::now());
        }
        Ok(())
    }

    fn guest_powered_off(&mut self) -> Option<VmExit> {
        match self.soft_reboot.left(Instant::now()) {
            Some(_) => self.reset_or_defer("soft reboot"),
            None => Some(VmExit::new(ExitReason::Poweroff, "guest powered off")),
        }
    }

    fn handle_event(&mut self, event: VmEvent) -> Option<VmExit> {
        match event {
            VmEvent::Guest(MachineEvent::Poweroff) => self.guest_powered_off(),
            VmEvent::Guest(MachineEvent::Reset(cause)) => self.reset_or_defer(cause),
            VmEvent::Guest(MachineEvent::Panicked) => {
                Some(VmExit::new(ExitReason::GuestPanic, "guest kernel panicked"))
            }
            VmEvent::Guest(MachineEvent::CrashLoaded) => {
                let message = "guest kernel panicked and runs its crash kernel".to_owned();
                self.events.emit(Kind::Warning(pb::event::Warning {
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
                Some(VmExit::error(format!("vCPU {index}: {text}")))
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

    /// The events that tell a new subscriber what holds already.
    fn present(&self) -> Vec<pb::Event> {
        let mut present = vec![Kind::State(self.state.into())];
        // Each boot but the first follows a reset.
        let resets = self.boots.saturating_sub(1);
        present.extend((resets > 0).then_some(Kind::Resets(resets)));
        present.extend(self.io_errors());
        if self.pause_reasons.contains(PauseReason::Watchdog) {
            let action = WatchdogAction::Pause.into();
            present.push(Kind::Watchdog(pb::event::WatchdogBite { action }));
        }
        present.into_iter().map(event).collect()
    }

    /// The VM but for its SCSI disks, whose controller is returned.
    fn info(&self) -> (pb::InfoResponse, Option<ScsiHandle>) {
        let machine = self.running.as_ref().map(|r| &r.machine);
        let info = pb::InfoResponse {
            state: self.state.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            guest_memory_bytes: machine.map_or(0, Machine::memory_bytes),
            vcpus: machine.map_or(0, Machine::vcpu_count),
            booted_from: self.booted_from.clone(),
            boots: self.boots,
            console_dropped_bytes: machine.map_or(0, |m| m.serial().dropped()),
            disks: machine.map_or_else(Vec::new, |m| m.disks().map(disks::blk_info).collect()),
            nics: machine.map_or_else(Vec::new, |m| {
                let nics = m.nics();
                nics.map(|nic| nics::info(nic, m.is_ejectable(nic))).collect()
            }),
            // The guest controls this value, which cannot exceed its memory.
            balloon_bytes: machine.and_then(|m| Some(m.balloon()?.actual().min(m.memory_bytes()))),
            pause_reasons: self.pause_reasons.iter().map(Into::into).collect(),
        };
        (info, machine.map(|machine| machine.scsi().clone()))
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
