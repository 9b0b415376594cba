//! Requests to the agent that follow from a change of the VM's state: set the time, power off.

use std::time::{Duration, Instant};

/// Time in which the guest may react to the power button alone, and time between two requests to the agent.
const SHUTDOWN_EVERY: Duration = Duration::from_secs(5);

/// Requests to the guest agent that are not sent yet.
#[derive(Debug, Default)]
pub(super) struct AgentTasks {
    paused: bool,
    /// The VM was paused and resumed, so its clock is late.
    clock_is_late: bool,
    /// The agent did not set the time, perhaps because file systems are frozen.
    time_refused: bool,
    /// The VM was restored from a snapshot, so its clock is late, and its agent was not asked yet.
    restored: bool,
    /// When the agent is asked to power off. `None` while the VM is not to end.
    shutdown_at: Option<Instant>,
}

/// A request to the guest agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AgentTask {
    SetTime,
    ShutDown,
}

impl AgentTasks {
    /// Follows the state of the VM.
    pub(super) fn follow(&mut self, paused: bool, stopping: bool, now: Instant) {
        self.clock_is_late |= self.paused && !paused;
        self.paused = paused;
        match stopping {
            true => _ = self.shutdown_at.get_or_insert(now + SHUTDOWN_EVERY),
            false => self.shutdown_at = None,
        }
    }

    /// The requests for a VM, which may be restored from a snapshot.
    pub(super) fn new(restored: bool) -> AgentTasks {
        AgentTasks {
            restored,
            ..AgentTasks::default()
        }
    }

    /// The guest has an agent.
    pub(super) fn connected(&mut self) {
        self.clock_is_late |= std::mem::take(&mut self.restored);
    }

    /// The guest has no agent.
    pub(super) fn disconnected(&mut self) {
        self.clock_is_late = false;
    }

    /// The agent, which may be frozen, has not set the time.
    pub(super) fn time_refused(&mut self) {
        self.time_refused = true;
    }

    /// No file systems are frozen.
    pub(super) fn thawed(&mut self) {
        self.clock_is_late |= std::mem::take(&mut self.time_refused);
    }

    /// The guest has booted, and has read the time.
    pub(super) fn rebooted(&mut self) {
        self.clock_is_late = false;
        self.time_refused = false;
        self.restored = false;
    }

    pub(super) fn wake_at(&self, now: Instant) -> Option<Instant> {
        match self.clock_is_late {
            true => Some(now),
            false => self.shutdown_at,
        }
    }

    /// Takes a request that is due.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<AgentTask> {
        if std::mem::take(&mut self.clock_is_late) {
            return Some(AgentTask::SetTime);
        }
        self.shutdown_at.filter(|at| *at <= now)?;
        self.shutdown_at = Some(now + SHUTDOWN_EVERY);
        Some(AgentTask::ShutDown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(tasks.take_due(now), None);
    }

    #[test]
    fn the_time_is_set_once_after_a_restore() {
        let now = Instant::now();
        let mut tasks = AgentTasks::new(true);
        // The VMM reports the port after the first events.
        tasks.follow(false, false, now);
        tasks.disconnected();
        assert_eq!(tasks.take_due(now), None);
        tasks.connected();
        assert_eq!(tasks.take_due(now), Some(AgentTask::SetTime));
        tasks.disconnected();
        tasks.connected();
        assert_eq!(tasks.take_due(now), None);
        // A guest that has booted since knows the time.
        let mut tasks = AgentTasks::new(true);
        tasks.rebooted();
        tasks.connected();
        assert_eq!(tasks.take_due(now), None);
    }

    #[test]
    fn a_time_that_was_refused_is_set_after_the_thaw() {
        let (mut tasks, now) = (AgentTasks::new(true), Instant::now());
        tasks.connected();
        assert_eq!(tasks.take_due(now), Some(AgentTask::SetTime));
        tasks.time_refused();
        assert_eq!(tasks.take_due(now), None);
        tasks.thawed();
        assert_eq!(tasks.take_due(now), Some(AgentTask::SetTime));
        tasks.thawed();
        assert_eq!(tasks.take_due(now), None);
        tasks.time_refused();
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
