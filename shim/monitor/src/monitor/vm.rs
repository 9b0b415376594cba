//! The actor that owns the VMM process, from its start to its end.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use husk_proto::vmm::v1::event::Exit;
use husk_proto::vmm::v1::vmm_client::VmmClient;
use husk_proto::vmm::v1::{Event, ResumeRequest, ShutdownRequest, StopRequest};
use husk_vmi::VmPlan;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tonic::Streaming;
use tonic::transport::Channel;
use tracing::{info, warn};

use super::disks;
use super::ending::{Ending, KilledBecause};
use super::interfaces;
use super::power::{Due, Stopping};
use super::start::{Started, last_event, start};
use super::status::Board;
use super::vmm_link::Link;
use crate::launch::{Report, Starter};
use crate::surroundings::Surroundings;
use crate::vmm_process::VmmProcess;

/// How long a VMM has to end once told to; then it is killed.
const STOP_WITHIN: Duration = Duration::from_secs(2);
/// How long one request to the VMM may take before the next is due.
const PRESS_WITHIN: Duration = Duration::from_secs(4);
/// How long the last events of a VMM that has exited may take to be read.
const DRAIN_WITHIN: Duration = Duration::from_millis(200);

/// Where the VMM is reached while the VM runs.
#[derive(Debug, Clone)]
pub(super) struct Running {
    pub(super) client: VmmClient<Channel>,
    pub(super) pid: u32,
}

/// A handle on the actor.
#[derive(Debug, Clone)]
pub(super) struct Handle {
    mailbox: mpsc::Sender<Command>,
}

#[derive(Debug)]
enum Command {
    Shutdown {
        grace_seconds: Option<u64>,
        reply: oneshot::Sender<u64>,
    },
    Kill {
        reply: oneshot::Sender<()>,
    },
}

impl Handle {
    /// Begins a graceful end and tells the grace period in effect; nothing if the VM has ended.
    pub(super) async fn shutdown(&self, grace_seconds: Option<u64>) -> Option<u64> {
        let (reply, answer) = oneshot::channel();
        self.mailbox
            .send(Command::Shutdown { grace_seconds, reply })
            .await
            .ok()?;
        answer.await.ok()
    }

    /// Ends the VM at once; nothing if it has ended.
    pub(super) async fn kill(&self) -> Option<()> {
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(Command::Kill { reply }).await.ok()?;
        answer.await.ok()
    }
}

#[derive(Debug)]
pub(super) struct Vm {
    plan: Arc<VmPlan>,
    surroundings: Arc<Surroundings>,
    board: Board,
    running: watch::Sender<Option<Running>>,
    disks: disks::Handle,
    interfaces: interfaces::Handle,
    mailbox: mpsc::Receiver<Command>,
    stopping: Option<Stopping>,
    killed: Option<Killed>,
}

#[derive(Debug, Clone, Copy)]
struct Killed {
    because: KilledBecause,
    /// When patience with the VMM ends; nothing once it has.
    at: Option<Instant>,
}

impl Vm {
    pub(super) fn new(
        plan: Arc<VmPlan>,
        surroundings: Arc<Surroundings>,
        board: Board,
        running: watch::Sender<Option<Running>>,
        disks: disks::Handle,
        interfaces: interfaces::Handle,
    ) -> (Vm, Handle) {
        let (sender, mailbox) = mpsc::channel(16);
        (
            Vm {
                plan,
                surroundings,
                board,
                running,
                disks,
                interfaces,
                mailbox,
                stopping: None,
                killed: None,
            },
            Handle { mailbox: sender },
        )
    }

    /// The whole life of the VM.
    pub(super) async fn live(mut self, console: Option<OwnedFd>, mut starter: Starter) -> Ending {
        let mut signals = match Signals::new() {
            Ok(signals) => signals,
            Err(error) => {
                let ending = Ending::not_started("StartFailed", error.to_string(), Default::default());
                return not_started(starter, ending);
            }
        };
        let begun = {
            let begin = start(
                self.plan.clone(),
                self.surroundings.clone(),
                &self.interfaces,
                console,
                &self.board,
                &mut starter,
            );
            tokio::select! {
                started = begin => started.map_err(Ending::from),
                () = told_to_end(&mut self.mailbox, &mut signals) => Err(self.ending_of_kill(KilledBecause::Asked)),
            }
        };
        match begun {
            Ok(started) => self.supervise(started, signals, starter).await,
            Err(ending) => not_started(starter, ending),
        }
    }

    async fn supervise(mut self, started: Started, mut signals: Signals, starter: Starter) -> Ending {
        let Started {
            mut vmm,
            events,
            probes,
        } = started;
        let link = Link {
            client: vmm.client(),
            fds: vmm.fds().clone(),
        };
        self.interfaces.began(link.clone()).await;
        self.disks.began(link, probes).await;
        self.running.send_replace(Some(Running {
            client: vmm.client(),
            pid: vmm.pid().unwrap_or(0),
        }));
        let mut events = Some(events);
        let mut last = None;
        info!(vmm = vmm.pid(), "the VM runs");
        if !starter.report(&Report::Running {
            pid: std::process::id(),
        }) {
            self.kill(&vmm, KilledBecause::StarterGone);
        }
        let exit = loop {
            let wake_at = self.wake_at();
            tokio::select! {
                exit = vmm.wait() => break exit,
                event = next(&mut events) => match event {
                    Some(event) => self.hear(&event, &mut last),
                    None => events = None,
                },
                Some(command) = self.mailbox.recv() => self.obey(command, &vmm),
                () = signals.received() => self.signalled(&vmm),
                () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {
                    self.timed(&mut vmm);
                }
            }
        };
        self.running.send_replace(None);
        while let Ok(Some(event)) = timeout(DRAIN_WITHIN, next(&mut events)).await {
            self.hear(&event, &mut last);
        }
        match (exit, self.killed) {
            (Ok(exit), None) => Ending::of_vmm(&exit, last.as_ref()),
            (Ok(exit), Some(killed)) => Ending {
                exit: exit.reason,
                ..self.ending_of_kill(killed.because)
            },
            (Err(error), _) => Ending::not_started("VmmFailed", error.to_string(), Default::default()),
        }
    }

    fn ending_of_kill(&self, because: KilledBecause) -> Ending {
        Ending::killed(because, self.plan.acpi, Default::default())
    }

    fn hear(&self, event: &Event, last: &mut Option<Exit>) {
        self.board.tell(event);
        if let Some(exit) = last_event(event) {
            *last = Some(exit.clone());
        }
    }

    fn obey(&mut self, command: Command, vmm: &VmmProcess) {
        match command {
            Command::Shutdown { grace_seconds, reply } => {
                let grace = grace_seconds.unwrap_or(self.plan.grace_period_seconds);
                let _ = reply.send(self.shut_down(grace, vmm));
            }
            Command::Kill { reply } => {
                self.kill(vmm, KilledBecause::Asked);
                let _ = reply.send(());
            }
        }
    }

    /// The first signal asks, the second does not.
    fn signalled(&mut self, vmm: &VmmProcess) {
        if self.stopping.is_some() {
            self.kill(vmm, KilledBecause::Asked);
        } else {
            self.shut_down(self.plan.grace_period_seconds, vmm);
        }
    }

    /// Begins, or hurries, a graceful end and tells the grace period in effect.
    fn shut_down(&mut self, grace_seconds: u64, vmm: &VmmProcess) -> u64 {
        if grace_seconds == 0 || !self.plan.acpi {
            self.kill(vmm, KilledBecause::Asked);
            return 0;
        }
        let stopping = Stopping::asked(self.stopping, grace_seconds, Instant::now());
        info!(grace_seconds = stopping.grace_seconds(), "the VM shall power off");
        self.board.stopping();
        self.stopping = Some(stopping);
        stopping.grace_seconds()
    }

    fn wake_at(&self) -> Option<Instant> {
        match self.killed {
            Some(killed) => killed.at,
            None => self.stopping.map(|stopping| stopping.wake_at()),
        }
    }

    fn timed(&mut self, vmm: &mut VmmProcess) {
        if let Some(killed) = &mut self.killed {
            warn!("the VMM did not end when told to and is killed");
            killed.at = None;
            vmm.kill();
            return;
        }
        match self
            .stopping
            .as_mut()
            .map(|stopping| stopping.due(Instant::now()))
        {
            Some(Due::Press) => self.press(vmm),
            Some(Due::Kill { grace_seconds }) => {
                self.kill(
                    vmm,
                    KilledBecause::GraceExpired {
                        seconds: grace_seconds,
                    },
                );
            }
            Some(Due::Nothing) | None => {}
        }
    }

    /// Presses the power button. A paused guest could not hear it, so it runs again.
    fn press(&self, vmm: &VmmProcess) {
        let (mut client, paused) = (vmm.client(), self.board.is_paused());
        tokio::spawn(async move {
            let press = async {
                if paused {
                    client.resume(ResumeRequest {}).await?;
                }
                client.shutdown(ShutdownRequest {}).await
            };
            match timeout(PRESS_WITHIN, press).await {
                Ok(Ok(_)) => info!("power button pressed"),
                Ok(Err(status)) => warn!(
                    message = status.message(),
                    "the power button could not be pressed"
                ),
                Err(_) => warn!("the VMM did not press the power button in time"),
            }
        });
    }

    /// Tells the VMM to end; it is killed if it does not.
    fn kill(&mut self, vmm: &VmmProcess, because: KilledBecause) {
        if self.killed.is_some() {
            return;
        }
        self.board.stopping();
        self.killed = Some(Killed {
            because,
            at: Some(Instant::now() + STOP_WITHIN),
        });
        let mut client = vmm.client();
        // If this fails, time does it.
        tokio::spawn(async move { timeout(STOP_WITHIN, client.stop(StopRequest {})).await });
    }
}

fn not_started(starter: Starter, ending: Ending) -> Ending {
    starter.report(&Report::Failed {
        reason: ending.reason.into(),
        message: ending.message.clone(),
    });
    ending
}

/// The next event; nothing at the end of the stream; forever waiting after that.
async fn next(events: &mut Option<Streaming<Event>>) -> Option<Event> {
    match events {
        Some(events) => events.message().await.ok().flatten(),
        None => std::future::pending().await,
    }
}

/// While a VM starts there is no guest to ask.
async fn told_to_end(mailbox: &mut mpsc::Receiver<Command>, signals: &mut Signals) {
    tokio::select! {
        Some(command) = mailbox.recv() => match command {
            Command::Shutdown { reply, .. } => drop(reply.send(0)),
            Command::Kill { reply } => drop(reply.send(())),
        },
        () = signals.received() => {}
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
