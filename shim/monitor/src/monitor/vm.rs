//! The actor that owns the VMM process.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use husk_proto::fds::FdSender;
use husk_proto::vmm::v1::event::{Event as Kind, Exit};
use husk_proto::vmm::v1::vmm_client::VmmClient;
use husk_proto::vmm::v1::{Event, ShutdownRequest, StopRequest};
use husk_vmi::VmPlan;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tonic::transport::Channel;
use tracing::{info, warn};

use super::disks;
use super::event_log::EventLog;
use super::final_status::{FinalStatus, KillReason};
use super::guest_channel::{GuestPort, PortOpenSender};
use super::handle::VMM_TIMEOUT;
use super::interfaces;
use super::power::{GracefulShutdown, ShutdownStep};
use super::snapshots::SnapshotsHandle;
use super::start::{StartedVm, exit_event, start};
use super::status::StatusPublisher;
use super::vm_config::GuestSockets;
use super::vm_error::VmError;
use super::vmm_connection::{VmmConnection, call_within};
use crate::launch::{RestoreOptions, StartMode, StartReport};
use crate::vm_environment::VmEnvironment;
use crate::vmm_process::VmmProcess;

/// Maximum time for the VMM to exit after `Stop`. Then it is killed.
const STOP_WITHIN: Duration = Duration::from_secs(2);
/// Timeout of one press of the power button. Shorter than the interval between presses.
const PRESS_WITHIN: Duration = Duration::from_secs(4);

/// A running VMM: its client, the socket that passes descriptors to it, and its process id.
#[derive(Debug, Clone)]
pub(super) struct RunningVmm {
    pub(super) client: VmmClient<Channel>,
    pub(super) fds: Arc<FdSender>,
    pub(super) pid: u32,
}

/// A handle to the actor.
#[derive(Debug, Clone)]
pub(super) struct VmActorHandle {
    mailbox: mpsc::Sender<VmCommand>,
}

#[derive(Debug)]
enum VmCommand {
    Shutdown {
        grace_seconds: Option<u64>,
        reply: oneshot::Sender<u64>,
    },
    Kill {
        reply: oneshot::Sender<()>,
    },
    SoftReboot {
        reply: oneshot::Sender<Result<(), VmError>>,
    },
}

impl VmActorHandle {
    /// Starts a graceful shutdown. Returns the grace period in effect, in seconds, or `None` if the VM has ended.
    pub(super) async fn shutdown(&self, grace_seconds: Option<u64>) -> Option<u64> {
        let (reply, answer) = oneshot::channel();
        self.mailbox
            .send(VmCommand::Shutdown { grace_seconds, reply })
            .await
            .ok()?;
        answer.await.ok()
    }

    /// Presses the power button to reboot the guest. Returns `None` if the VM has ended.
    pub(super) async fn soft_reboot(&self) -> Option<Result<(), VmError>> {
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(VmCommand::SoftReboot { reply }).await.ok()?;
        answer.await.ok()
    }

    /// Kills the VM. Returns `None` if it has ended.
    pub(super) async fn kill(&self) -> Option<()> {
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(VmCommand::Kill { reply }).await.ok()?;
        answer.await.ok()
    }
}

/// The guest's ends of what the monitor serves.
#[derive(Debug)]
pub(super) struct GuestFds {
    pub(super) console: Option<OwnedFd>,
    pub(super) ports: Vec<GuestPort>,
    /// The disk of downward metrics.
    pub(super) metrics_disk: Option<OwnedFd>,
}

#[derive(Debug)]
pub(super) struct VmActor {
    plan: Arc<VmPlan>,
    environment: Arc<VmEnvironment>,
    publisher: StatusPublisher,
    event_log: EventLog,
    running: watch::Sender<Option<RunningVmm>>,
    disks: disks::DisksHandle,
    interfaces: interfaces::InterfacesHandle,
    snapshots: SnapshotsHandle,
    /// The guest's ports.
    ports: Vec<PortOpenSender>,
    mailbox: mpsc::Receiver<VmCommand>,
    stopping: Option<GracefulShutdown>,
    killed: Option<KillInProgress>,
    /// A signal has asked for the end.
    signalled: bool,
    /// The last press of the power button, perhaps under way.
    last_press: Option<JoinHandle<()>>,
}

#[derive(Debug, Clone, Copy)]
struct KillInProgress {
    reason: KillReason,
    /// Time at which the process is killed; `None` once it has been.
    at: Option<Instant>,
}

impl VmActor {
    pub(super) fn new(
        plan: Arc<VmPlan>,
        environment: Arc<VmEnvironment>,
        publisher: StatusPublisher,
        running: watch::Sender<Option<RunningVmm>>,
        disks: disks::DisksHandle,
        interfaces: interfaces::InterfacesHandle,
        snapshots: SnapshotsHandle,
    ) -> (VmActor, VmActorHandle) {
        let (sender, mailbox) = mpsc::channel(16);
        (
            VmActor {
                plan,
                environment,
                publisher,
                event_log: EventLog::new(),
                running,
                disks,
                interfaces,
                snapshots,
                ports: Vec::new(),
                mailbox,
                stopping: None,
                killed: None,
                signalled: false,
                last_press: None,
            },
            VmActorHandle { mailbox: sender },
        )
    }

    /// Runs the VM, from a snapshot if one is given, until it has ended.
    pub(super) async fn run(
        mut self,
        guest: GuestFds,
        restore: Option<RestoreOptions>,
        mut start_mode: StartMode,
    ) -> FinalStatus {
        let GuestFds {
            console,
            ports,
            metrics_disk,
        } = guest;
        let mut sockets = GuestSockets {
            console,
            ports: Vec::new(),
            metrics_disk,
        };
        for GuestPort { name, stream, open } in ports {
            sockets.ports.push((name, stream));
            self.ports.push(open);
        }
        let mut signals = match Signals::new() {
            Ok(signals) => signals,
            Err(error) => {
                let final_status =
                    FinalStatus::not_started("StartFailed", error.to_string(), Default::default());
                return not_started(start_mode, final_status);
            }
        };
        let begun = {
            let begin = start(
                self.plan.clone(),
                self.environment.clone(),
                restore,
                &self.interfaces,
                sockets,
                &self.publisher,
                &mut start_mode,
            );
            tokio::select! {
                started = begin => started.map_err(FinalStatus::from),
                () = stop_requested(&mut self.mailbox, &mut signals) => Err(self.killed_status(KillReason::Requested)),
            }
        };
        match begun {
            Ok(started) => self.supervise(started, signals, start_mode).await,
            Err(final_status) => not_started(start_mode, final_status),
        }
    }

    async fn supervise(
        mut self,
        started: StartedVm,
        mut signals: Signals,
        start_mode: StartMode,
    ) -> FinalStatus {
        let StartedVm {
            mut vmm,
            mut events,
            disks,
        } = started;
        let connection = VmmConnection {
            client: vmm.client(),
            fds: vmm.fds().clone(),
        };
        self.interfaces.vm_started(connection.clone()).await;
        self.disks.vm_started(connection, disks).await;
        self.running.send_replace(Some(RunningVmm {
            client: vmm.client(),
            fds: vmm.fds().clone(),
            pid: vmm.pid().unwrap_or(0),
        }));
        let mut last = None;
        info!(vmm = vmm.pid(), "the VM runs");
        if !start_mode.report(&StartReport::Running {
            pid: std::process::id(),
        }) {
            self.kill(&vmm, KillReason::LauncherGone);
        }
        let exit = loop {
            let next_deadline = self.next_deadline();
            tokio::select! {
                exit = vmm.wait() => break exit,
                event = events.next() => self.handle_event(&event, &mut last),
                Some(command) = self.mailbox.recv() => self.handle_command(command, &vmm),
                () = signals.received() => self.handle_signal(&vmm),
                () = sleep_until(next_deadline.unwrap_or_else(Instant::now)), if next_deadline.is_some() => {
                    self.handle_deadline(&mut vmm);
                }
            }
        };
        self.running.send_replace(None);
        for event in events.drain().await {
            self.handle_event(&event, &mut last);
        }
        match (exit, self.killed) {
            (Ok(exit), None) => FinalStatus::of_vmm(&exit, last.as_ref()),
            (Ok(exit), Some(killed)) => FinalStatus {
                exit: exit.reason,
                ..self.killed_status(killed.reason)
            },
            (Err(error), _) => FinalStatus::not_started("VmmFailed", error.to_string(), Default::default()),
        }
    }

    fn killed_status(&self, reason: KillReason) -> FinalStatus {
        let may_power_off = self.plan.acpi && self.plan.grace_period_seconds > 0;
        FinalStatus::killed(reason, may_power_off, Default::default())
    }

    fn handle_event(&mut self, event: &Event, last: &mut Option<Exit>) {
        self.event_log.log(event);
        self.publisher.handle_vmm_event(event);
        if let Some(Kind::PortOpened(opened)) = &event.event {
            self.ports.iter().for_each(|port| port.handle_event(opened));
        }
        if let Some(exit) = exit_event(event) {
            *last = Some(exit.clone());
        }
    }

    fn handle_command(&mut self, command: VmCommand, vmm: &VmmProcess) {
        match command {
            VmCommand::Shutdown { grace_seconds, reply } => {
                let grace = grace_seconds.unwrap_or(self.plan.grace_period_seconds);
                let _ = reply.send(self.shut_down(grace, vmm));
            }
            VmCommand::Kill { reply } => {
                self.kill(vmm, KillReason::Requested);
                let _ = reply.send(());
            }
            VmCommand::SoftReboot { reply } => self.soft_reboot(vmm, reply),
        }
    }

    /// The first signal starts a graceful shutdown, or shortens the grace period of one that is under way: a service
    /// manager does not wait longer than for that of the manifest. The second kills the VM.
    fn handle_signal(&mut self, vmm: &VmmProcess) {
        if std::mem::replace(&mut self.signalled, true) {
            self.kill(vmm, KillReason::Requested);
        } else {
            self.shut_down(self.plan.grace_period_seconds, vmm);
        }
    }

    /// Starts a graceful shutdown or shortens its grace period. Returns the grace period in effect, in seconds.
    fn shut_down(&mut self, grace_seconds: u64, vmm: &VmmProcess) -> u64 {
        if grace_seconds == 0 || !self.plan.acpi {
            self.kill(vmm, KillReason::Requested);
            return 0;
        }
        let stopping = GracefulShutdown::requested(self.stopping, grace_seconds, Instant::now());
        info!(grace_seconds = stopping.grace_seconds(), "shutting down");
        self.publisher.stopping();
        self.stopping = Some(stopping);
        stopping.grace_seconds()
    }

    fn next_deadline(&self) -> Option<Instant> {
        match self.killed {
            Some(killed) => killed.at,
            None => self.stopping.map(|stopping| stopping.next_deadline()),
        }
    }

    fn handle_deadline(&mut self, vmm: &mut VmmProcess) {
        if let Some(killed) = &mut self.killed {
            warn!("the VMM did not exit in time and is killed");
            killed.at = None;
            vmm.kill();
            return;
        }
        match self
            .stopping
            .as_mut()
            .map(|stopping| stopping.due(Instant::now()))
        {
            Some(ShutdownStep::Press) => self.press_power_button(vmm),
            Some(ShutdownStep::Kill { grace_seconds }) => {
                self.kill(
                    vmm,
                    KillReason::GraceExpired {
                        seconds: grace_seconds,
                    },
                );
            }
            Some(ShutdownStep::Nothing) | None => {}
        }
    }

    /// Presses the power button to reboot the guest, unless it cannot react or is to shut down.
    fn soft_reboot(&mut self, vmm: &VmmProcess, reply: oneshot::Sender<Result<(), VmError>>) {
        let refused = if self.stopping.is_some() || self.killed.is_some() {
            Some("the VM is being shut down")
        } else {
            self.publisher.is_paused().then_some("the VM is paused")
        };
        if let Some(text) = refused {
            return drop(reply.send(Err(VmError::wrong_state(text))));
        }
        let mut client = vmm.client();
        self.press_in_order(async move |before| {
            let pressed = call_within(VMM_TIMEOUT, async {
                before.await;
                client.shutdown(ShutdownRequest { reboot: true }).await
            });
            let _ = reply.send(pressed.await.map(drop));
        });
    }

    /// Starts a press, which gets a future of the end of the one before: the VMM obeys the last that arrives.
    fn press_in_order<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        press: impl FnOnce(Pin<Box<dyn Future<Output = ()> + Send>>) -> F,
    ) {
        let before = self.last_press.take();
        let before = Box::pin(async move {
            if let Some(before) = before {
                let _ = before.await;
            }
        });
        self.last_press = Some(tokio::spawn(press(before)));
    }

    /// Presses the power button. A paused guest cannot react to it, so it is resumed first.
    fn press_power_button(&mut self, vmm: &VmmProcess) {
        let (mut client, paused) = (vmm.client(), self.publisher.is_paused());
        let snapshots = self.snapshots.clone();
        self.press_in_order(async move |before| {
            let press = async {
                before.await;
                if paused {
                    snapshots.resume_for_shutdown().await?;
                }
                client.shutdown(ShutdownRequest { reboot: false }).await?;
                Ok::<_, VmError>(())
            };
            match timeout(PRESS_WITHIN, press).await {
                Ok(Ok(())) => info!("power button pressed"),
                Ok(Err(error)) => warn!(%error, "the power button could not be pressed"),
                Err(_) => warn!("the power button was not pressed in time"),
            }
        });
    }

    /// Asks the VMM to exit. It is killed if it does not.
    fn kill(&mut self, vmm: &VmmProcess, reason: KillReason) {
        if self.killed.is_some() {
            return;
        }
        self.publisher.stopping();
        self.killed = Some(KillInProgress {
            reason,
            at: Some(Instant::now() + STOP_WITHIN),
        });
        let mut client = vmm.client();
        // If this fails, the deadline kills it.
        tokio::spawn(async move { timeout(STOP_WITHIN, client.stop(StopRequest {})).await });
    }
}

fn not_started(start_mode: StartMode, final_status: FinalStatus) -> FinalStatus {
    start_mode.report(&StartReport::Failed {
        reason: final_status.reason.into(),
        message: final_status.message.clone(),
    });
    final_status
}

/// Waits for a request to end the VM during its start. There is no guest yet that could shut down.
async fn stop_requested(mailbox: &mut mpsc::Receiver<VmCommand>, signals: &mut Signals) {
    loop {
        tokio::select! {
            Some(command) = mailbox.recv() => match command {
                VmCommand::Shutdown { reply, .. } => {
                    let _ = reply.send(0);
                    return;
                }
                VmCommand::Kill { reply } => {
                    let _ = reply.send(());
                    return;
                }
                VmCommand::SoftReboot { reply } => drop(reply.send(Err(VmError::not_running()))),
            },
            () = signals.received() => return,
        }
    }
}

#[derive(Debug)]
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn received(&mut self) {
        tokio::select! {
            Some(()) = self.terminate.recv() => {}
            Some(()) = self.interrupt.recv() => {}
            else => std::future::pending().await,
        }
    }
}
