//! Requests to the agent that follow from a change of the VM's state: set the time, power off.

use std::time::{Duration, Instant};

/// Time in which the guest may react to the power button alone, and time between two requests to the agent.
const SHUTDOWN_EVERY: Duration = Duration::from_secs(5);
/// Time between two attempts to set the time, and after which an agent that is there is asked no more, as in KubeVirt.
const SET_TIME_EVERY: Duration = Duration::from_secs(1);
const SET_TIME_FOR: Duration = Duration::from_secs(60);

/// Requests to the guest agent that are not sent yet.
#[derive(Debug, Default)]
pub(super) struct AgentTasks {
    paused: bool,
    /// The VM was paused and resumed, or restored from a snapshot, and its time was not set yet.
    late_clock: Option<LateClock>,
    /// The agent did not set the time, perhaps because file systems are frozen.
    time_refused: bool,
    /// When the agent is asked to power off. `None` while the VM is not to end.
    shutdown_at: Option<Instant>,
}

/// The attempts to set the time.
#[derive(Debug, Default)]
struct LateClock {
    /// The next one. `None`: at once.
    next: Option<Instant>,
    /// When they end. `None` until the first one since the agent is there.
    deadline: Option<Instant>,
}

/// A request to the guest agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AgentTask {
    SetTime,
    ShutDown,
}

impl AgentTasks {
    /// The requests for a VM, which may be restored from a snapshot.
    pub(super) fn new(restored: bool) -> AgentTasks {
        AgentTasks {
            late_clock: restored.then(LateClock::default),
            ..AgentTasks::default()
        }
    }

    /// Follows the state of the VM.
    pub(super) fn follow(&mut self, paused: bool, stopping: bool, now: Instant) {
        if self.paused && !paused {
            self.late_clock = Some(LateClock::default());
        }
        self.paused = paused;
        match stopping {
            true => _ = self.shutdown_at.get_or_insert(now + SHUTDOWN_EVERY),
            false => self.shutdown_at = None,
        }
    }

    /// The guest has no agent. The next one gets as much time.
    pub(super) fn disconnected(&mut self) {
        if let Some(late) = &mut self.late_clock {
            *late = LateClock::default();
        }
    }

    /// The agent has set the time.
    pub(super) fn time_set(&mut self) {
        self.late_clock = None;
        self.time_refused = false;
    }

    /// The agent has not set the time. It may be frozen, or lack the command at present.
    pub(super) fn time_failed(&mut self, is_thawed: bool, is_unsupported: bool, now: Instant) {
        self.time_refused = !is_thawed;
        match &mut self.late_clock {
            Some(late) if !is_unsupported => late.next = Some(now + SET_TIME_EVERY),
            _ => self.late_clock = None,
        }
    }

    /// No file systems are frozen.
    pub(super) fn thawed(&mut self) {
        if std::mem::take(&mut self.time_refused) {
            self.late_clock = Some(LateClock::default());
        }
    }

    /// The guest has booted, and has read the time.
    pub(super) fn rebooted(&mut self) {
        self.time_set();
    }

    /// When a request is due, if the agent is there.
    pub(super) fn wake_at(&self, now: Instant) -> Option<Instant> {
        let set_time = self.late_clock.as_ref().map(|late| late.next.unwrap_or(now));
        set_time.into_iter().chain(self.shutdown_at).min()
    }

    /// Takes a request that is due. The agent is there.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<AgentTask> {
        if let Some(late) = &mut self.late_clock
            && late.next.is_none_or(|next| next <= now)
        {
            if now < *late.deadline.get_or_insert(now + SET_TIME_FOR) {
                late.next = Some(now + SET_TIME_EVERY);
                return Some(AgentTask::SetTime);
            }
            self.late_clock = None;
        }
        self.shutdown_at.filter(|at| *at <= now)?;
        self.shutdown_at = Some(now + SHUTDOWN_EVERY);
        Some(AgentTask::ShutDown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The requests for a VM that was paused and resumed.
    fn resumed(now: Instant) -> AgentTasks {
        let mut tasks = AgentTasks::default();
        tasks.follow(true, false, now);
        tasks.follow(false, false, now);
        tasks
    }

    #[test]
    fn the_time_is_set_once_after_a_pause() {
        let (mut tasks, now) = (AgentTasks::default(), Instant::now());
        tasks.follow(false, false, now);
        assert_eq!(tasks.take_due(now), None);
        tasks.follow(true, false, now);
        assert_eq!(tasks.wake_at(now), None);
        tasks.follow(false, false, now);
        assert_eq!(tasks.wake_at(now), Some(now));
        assert_eq!(tasks.take_due(now), Some(AgentTask::SetTime));
        tasks.time_set();
        assert_eq!(tasks.wake_at(now), None);
        tasks.thawed();
        assert_eq!(tasks.take_due(now + SET_TIME_EVERY), None);
    }

    #[test]
    fn the_time_is_set_once_after_a_restore() {
        let now = Instant::now();
        let mut tasks = AgentTasks::new(true);
        // The VMM reports the port after the first events.
        tasks.follow(false, false, now);
        tasks.disconnected();
        assert_eq!(tasks.take_due(now), Some(AgentTask::SetTime));
        tasks.time_set();
        tasks.disconnected();
        assert_eq!(tasks.take_due(now), None);
        // A guest that has booted since knows the time.
        let mut tasks = AgentTasks::new(true);
        tasks.rebooted();
        assert_eq!(tasks.take_due(now), None);
    }

    #[test]
    fn a_time_that_is_not_set_is_tried_for_a_minute() {
        let start = Instant::now();
        let mut tasks = resumed(start);
        tasks.disconnected();
        let connected = start + Duration::from_secs(600);
        let mut attempts = 0;
        for second in 0..600 {
            let now = connected + Duration::from_secs(second);
            if tasks.take_due(now).is_some() {
                attempts += 1;
                tasks.time_failed(true, false, now);
            }
        }
        assert_eq!((attempts, tasks.wake_at(connected)), (60, None));
    }

    #[test]
    fn an_agent_that_cannot_set_the_time_is_not_asked_again() {
        let now = Instant::now();
        let mut tasks = resumed(now);
        assert_eq!(tasks.take_due(now), Some(AgentTask::SetTime));
        tasks.time_failed(true, true, now);
        tasks.thawed();
        assert_eq!(tasks.wake_at(now), None);
    }

    #[test]
    fn a_time_that_was_refused_is_set_after_the_thaw() {
        let (mut tasks, now) = (AgentTasks::new(true), Instant::now());
        assert_eq!(tasks.take_due(now), Some(AgentTask::SetTime));
        tasks.time_failed(false, true, now);
        assert_eq!(tasks.take_due(now + SET_TIME_EVERY), None);
        tasks.thawed();
        assert_eq!(tasks.take_due(now), Some(AgentTask::SetTime));
        tasks.time_set();
        tasks.thawed();
        assert_eq!(tasks.take_due(now), None);
        tasks.time_failed(false, true, now);
        tasks.rebooted();
        tasks.thawed();
        assert_eq!(tasks.take_due(now), None);
    }

    #[test]
    fn the_agent_is_asked_if_the_power_button_has_no_effect() {
        let (mut tasks, start) = (AgentTasks::default(), Instant::now());
        tasks.follow(false, true, start);
        assert_eq!(tasks.take_due(start), None);
        let second = start + SHUTDOWN_EVERY;
        tasks.follow(false, true, second);
        assert_eq!(tasks.wake_at(second), Some(second));
        assert_eq!(tasks.take_due(second), Some(AgentTask::ShutDown));
        assert_eq!(tasks.take_due(second), None);
        assert_eq!(tasks.take_due(second + SHUTDOWN_EVERY), Some(AgentTask::ShutDown));
        tasks.follow(false, false, second);
        assert_eq!(tasks.wake_at(second), None);
    }
}
