//! The actor that talks to the guest's agent. It asks at KubeVirt's intervals, carries out commands one after the other,
//! thaws file systems that nobody else thaws in time, sets the time of a VM that was paused, and asks a guest to power
//! off that does not react to the power button.

mod agent_tasks;
mod credentials;
mod handle;
mod processes;
mod publisher;
mod service;
mod to_proto;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use husk_guest_agent::{
    AgentError, Answer, Answers, FreezeGuard, FsFreezeStatus, GuestAgent, Poller, Query, RequiredCommands,
    ShutdownMode, limit,
};
use husk_proto::shim::v1::{CredentialsState, Status as VmStatus};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep_until;
use tracing::{debug, info, warn};

use super::guest_channel::GuestChannel;
use super::status::PAUSED_IO_ERROR;
use super::vm_error::VmError;
use agent_tasks::{AgentTask, AgentTasks};
use handle::{AgentCommand, AgentView, Frozen, Reply};
use processes::Processes;
use publisher::StatePublisher;
use to_proto::state;

pub(super) use credentials::{needs, propagate};
pub use handle::AgentHandle;
pub(super) use service::GuestService;

/// The actor. It ends with the VM.
pub(super) struct AgentActor {
    /// True while a process of the guest has the agent's port open.
    open: watch::Receiver<bool>,
    status: watch::Receiver<VmStatus>,
    agent: GuestAgent<UnixStream>,
    poller: Poller,
    guard: FreezeGuard,
    /// The VM goes on from a snapshot, and it is not known yet whether its file systems were frozen then.
    restored: bool,
    processes: Processes,
    tasks: AgentTasks,
    /// The agent commands that the VMI requires.
    needs: RequiredCommands,
    credentials: Option<CredentialsState>,
    reboots: u64,
    mailbox: mpsc::Receiver<AgentCommand>,
    view: watch::Sender<AgentView>,
    state: StatePublisher,
}

/// The next action of the actor.
enum Work {
    Thaw,
    Process,
    AgentTask(AgentTask),
    Query(Query),
}

impl AgentActor {
    /// Creates the actor for a VM, which may go on from a snapshot.
    pub(super) fn new(
        channel: GuestChannel,
        status: watch::Receiver<VmStatus>,
        needs: RequiredCommands,
        restored: bool,
    ) -> (AgentActor, AgentHandle) {
        let (sender, mailbox) = mpsc::channel(16);
        let (view, shown) = watch::channel(AgentView::default());
        let (state, published) = StatePublisher::new();
        let actor = AgentActor {
            open: channel.open,
            status,
            agent: GuestAgent::new(channel.stream),
            poller: Poller::default(),
            guard: FreezeGuard::default(),
            restored,
            processes: Processes::default(),
            tasks: AgentTasks::new(restored),
            needs,
            credentials: None,
            reboots: 0,
            mailbox,
            view,
            state,
        };
        (actor, AgentHandle::new(sender, shown, published))
    }

    /// Serves commands until the VM has ended.
    pub(super) async fn run(mut self) {
        let mut status_ended = false;
        loop {
            let wake = self.wake_at();
            let wake = wake.into_iter().chain(self.state.wake_at()).min();
            tokio::select! {
                changed = self.open.changed() => match changed {
                    Ok(()) => self.follow(),
                    Err(_) => return,
                },
                changed = self.status.changed(), if !status_ended => match changed {
                    Ok(()) => self.follow(),
                    Err(_) => status_ended = true,
                },
                Some(command) = self.mailbox.recv() => {
                    self.follow();
                    self.handle(command).await;
                }
                () = until(wake) => {
                    self.follow();
                    self.work().await;
                }
            }
            self.show();
        }
    }

    /// Follows the state of the port and of the VM.
    fn follow(&mut self) {
        let now = Instant::now();
        let open = *self.open.borrow_and_update();
        let (paused, stopping, reboots) = {
            let status = self.status.borrow_and_update();
            (status.paused, status.stopping, status.reboots)
        };
        self.tasks.follow(paused, stopping, now);
        if reboots != self.reboots {
            // It may have been so fast that the port was never seen closed.
            self.reboots = reboots;
            self.poller.disconnected(now);
            self.poller.forget();
            self.tasks.rebooted();
            self.guard.thawed();
            self.restored = false;
            self.processes
                .fail_all(&VmError::wrong_state("the guest has rebooted"));
        }
        if open != self.poller.is_connected() {
            debug!(open, "the port of the guest's agent");
        }
        if open {
            self.poller.connected(now);
        } else {
            self.poller.disconnected(now);
            self.tasks.disconnected();
            self.processes.fail_all(&not_connected());
        }
        if paused {
            self.poller.paused(now);
        } else {
            self.poller.resumed(now);
        }
    }

    /// Fails if no agent is connected or the VM is paused.
    fn check(&self) -> Result<(), VmError> {
        if !self.poller.is_connected() {
            return Err(not_connected());
        }
        match self.status.borrow().paused {
            true => Err(VmError::wrong_state(
                "the VM is paused, so its guest agent cannot answer",
            )),
            false => Ok(()),
        }
    }

    fn is_paused_on_purpose(&self) -> bool {
        let status = self.status.borrow();
        status.paused && status.reason != PAUSED_IO_ERROR
    }

    fn wake_at(&self) -> Option<Instant> {
        self.check().ok()?;
        let times = [
            self.poller.wake_at(),
            self.guard.thaw_at(),
            self.processes.wake_at(),
            self.tasks.wake_at(Instant::now()),
        ];
        times.into_iter().flatten().min()
    }

    fn next(&mut self, now: Instant) -> Option<Work> {
        if self.guard.is_due(now) {
            return Some(Work::Thaw);
        }
        if self.processes.is_due(now) {
            return Some(Work::Process);
        }
        let task = self.tasks.take_due(now).map(Work::AgentTask);
        task.or_else(|| self.poller.take_due(now).map(Work::Query))
    }

    /// Does what is due first.
    async fn work(&mut self) {
        // What woke it may be the end of a wait to publish.
        if self.check().is_err() {
            return;
        }
        match self.next(Instant::now()) {
            Some(Work::Thaw) => self.thaw_in_time().await,
            Some(Work::Process) => {
                let frozen = self.may_be_frozen();
                self.processes.ask(&mut self.agent, frozen).await;
            }
            Some(Work::AgentTask(task)) => {
                let done = self.perform(task).await;
                if let Err(error) = &done {
                    debug!(%error, ?task, "the guest's agent");
                }
                match done {
                    _ if task != AgentTask::SetTime => {}
                    Ok(()) => self.tasks.time_set(),
                    Err(error) => {
                        // A frozen agent has it switched off.
                        let is_unsupported = matches!(error, AgentError::CommandNotFound { .. });
                        self.tasks
                            .time_failed(self.is_thawed(), is_unsupported, Instant::now());
                    }
                }
            }
            Some(Work::Query(query)) => self.ask(query).await,
            None => {}
        }
    }

    async fn perform(&mut self, task: AgentTask) -> Result<(), AgentError> {
        match task {
            AgentTask::SetTime => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let now = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX);
                self.agent.set_time(Some(now), limit::CHANGE).await
            }
            AgentTask::ShutDown => {
                info!("the guest has not powered off: its agent is asked to do it");
                self.agent
                    .shutdown(ShutdownMode::Powerdown, limit::SHUTDOWN)
                    .await
            }
        }
    }

    async fn thaw_in_time(&mut self) {
        match self.thaw().await {
            Ok(true) => warn!("nobody has thawed the guest's file systems in time: they are thawed now"),
            Ok(false) => {}
            Err(error) => warn!(%error, "the guest's file systems are not thawed"),
        }
    }

    async fn ask(&mut self, query: Query) {
        match self.agent.query(query, limit::QUERY).await {
            Ok(answer) => {
                if let Answer::FsFreezeStatus(status) = answer {
                    self.follow_freeze(status);
                }
                // A frozen agent has most of its commands switched off.
                if !(matches!(answer, Answer::Version(_)) && self.may_be_frozen()) {
                    self.poller.record(answer);
                }
            }
            Err(error) => debug!(%error, ?query, "the guest's agent"),
        }
    }

    fn follow_freeze(&mut self, status: FsFreezeStatus) {
        let restored = std::mem::take(&mut self.restored);
        match status {
            FsFreezeStatus::Thawed => {
                self.guard.thawed();
                self.tasks.thawed();
            }
            // Whoever froze them thaws the VM that was saved, not this one.
            FsFreezeStatus::Frozen if restored => {
                info!("the VM was saved while the guest's file systems were frozen");
                self.guard.freezing(Instant::now(), Some(Duration::ZERO));
            }
            FsFreezeStatus::Frozen => {}
        }
    }

    async fn handle(&mut self, command: AgentCommand) {
        match command {
            AgentCommand::Exec(exec, reply) => match self.check() {
                Ok(()) => self.processes.start(&mut self.agent, &exec, reply).await,
                Err(error) => drop(reply.send(Err(error))),
            },
            // Its caller has gone.
            AgentCommand::Freeze(_, reply) if reply.is_closed() => {}
            AgentCommand::Freeze(timeout, reply) => {
                let done = match self.check() {
                    Ok(()) => self.freeze(timeout).await,
                    Err(error) => Err(error),
                };
                let owned = matches!(done, Ok(Frozen { already: false, .. }));
                if reply.send(done).is_err() && owned {
                    // A thaw that fails is tried again.
                    self.guard.freezing(Instant::now(), Some(Duration::ZERO));
                    self.thaw_in_time().await;
                }
            }
            AgentCommand::Thaw(reply) => {
                let done = match self.check() {
                    Ok(()) => self.thaw().await,
                    Err(error) => Err(error),
                };
                let _ = reply.send(done);
            }
            // KubeVirt's probes take a VM that was paused on purpose as healthy.
            AgentCommand::Ping(reply) if self.is_paused_on_purpose() => drop(reply.send(Ok(()))),
            AgentCommand::Ping(reply) => {
                self.order(reply, async |agent| agent.ping(limit::QUERY).await)
                    .await;
            }
            AgentCommand::SetKeys { user, keys, reply } => {
                let set = async |agent: &mut GuestAgent<UnixStream>| {
                    agent
                        .ssh_add_authorized_keys(&user, &keys, true, limit::CHANGE)
                        .await
                };
                self.order(reply, set).await;
            }
            AgentCommand::Synchronized(state) => self.credentials = Some(state),
            AgentCommand::SetPassword {
                user,
                password,
                reply,
            } => {
                let set = async |agent: &mut GuestAgent<UnixStream>| {
                    agent
                        .set_user_password(&user, &password, false, limit::CHANGE)
                        .await
                };
                self.order(reply, set).await;
            }
        }
    }

    /// Carries out a command of one request, if there is an agent.
    async fn order(
        &mut self,
        reply: Reply<()>,
        command: impl AsyncFnOnce(&mut GuestAgent<UnixStream>) -> Result<(), AgentError>,
    ) {
        let done = match self.check() {
            Ok(()) => command(&mut self.agent).await.map_err(VmError::from),
            Err(error) => Err(error),
        };
        let _ = reply.send(done);
    }

    async fn freeze(&mut self, timeout: Option<Duration>) -> Result<Frozen, VmError> {
        let freeze = self.agent.freeze(&mut self.guard, timeout, limit::FREEZE);
        let already = !freeze.await?;
        if std::mem::take(&mut self.restored) && already {
            // They are since the snapshot, without a timer.
            self.guard.freezing(Instant::now(), timeout);
        }
        self.poller.record(Answer::FsFreezeStatus(FsFreezeStatus::Frozen));
        self.poller.poll_now(Query::FsFreezeStatus, Instant::now());
        Ok(Frozen {
            already,
            thaw_at: self.guard.thaw_at(),
        })
    }

    /// Returns false if they were thawed already.
    async fn thaw(&mut self) -> Result<bool, VmError> {
        let was_frozen = self.agent.thaw(&mut self.guard, limit::THAW).await?;
        self.thawed();
        Ok(was_frozen)
    }

    fn thawed(&mut self) {
        self.restored = false;
        self.tasks.thawed();
        self.poller.record(Answer::FsFreezeStatus(FsFreezeStatus::Thawed));
        self.poller.poll_now(Query::Version, Instant::now());
    }

    fn may_be_frozen(&self) -> bool {
        let status = self.poller.answers().fs_freeze_status;
        self.guard.thaw_at().is_some() || status == Some(FsFreezeStatus::Frozen)
    }

    fn is_thawed(&self) -> bool {
        !self.may_be_frozen() && self.poller.answers().fs_freeze_status.is_some()
    }

    /// Publishes what changed.
    fn show(&mut self) {
        let (connected, thaw_at) = (self.poller.is_connected(), self.guard.thaw_at());
        let answers: &Answers = self.poller.answers();
        self.view.send_if_modified(|view| {
            if view.connected == connected && view.thaw_at == thaw_at && view.answers == *answers {
                return false;
            }
            *view = AgentView {
                connected,
                thaw_at,
                answers: answers.clone(),
            };
            true
        });
        let mut new = state(connected, answers, self.needs);
        new.credentials.clone_from(&self.credentials);
        self.state.show(new, Instant::now());
    }
}

fn not_connected() -> VmError {
    VmError::wrong_state("no guest agent is connected: the guest needs a running qemu-guest-agent")
}

async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time.into()).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
