//! Requests to the agent that follow from a change of the VM's state: set the time, power off.

use std::time::{Duration, Instant};

/// Time in which the guest may react to the power button alone, and time between two requests to the agent.
const SHUTDOWN_EVERY: Duration = Duration::from_secs(5);

/// The duties that are not done yet.
#[derive(Debug, Default)]
pub(super) struct Duties {
    paused: bool,
    /// A paused VM goes on, and its clock is late.
    clock_is_late: bool,
    /// The agent did not set the time, perhaps because file systems are frozen.
    time_refused: bool,
    /// The VM goes on from a snapshot: its clock is late, and nobody has asked its agent yet.
    restored: bool,
    /// When the agent is asked to power off. `None` while the VM is not to end.
    shutdown_at: Option<Instant>,
}

/// A duty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Duty {
    SetTime,
    ShutDown,
}

impl Duties {
    /// Follows the state of the VM.
    pub(super) fn follow(&mut self, paused: bool, stopping: bool, now: Instant) {
        self.clock_is_late |= self.paused && !paused;
        self.paused = paused;
        match stopping {
            true => _ = self.shutdown_at.get_or_insert(now + SHUTDOWN_EVERY),
            false => self.shutdown_at = None,
        }
    }

    /// The duties of a VM, which may go on from a snapshot.
    pub(super) fn new(restored: bool) -> Duties {
        Duties {
            restored,
            ..Duties::default()
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

    /// Takes a duty that is due.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Duty> {
        if std::mem::take(&mut self.clock_is_late) {
            return Some(Duty::SetTime);
        }
        self.shutdown_at.filter(|at| *at <= now)?;
        self.shutdown_at = Some(now + SHUTDOWN_EVERY);
        Some(Duty::ShutDown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_set_once_after_a_pause() {
        let (mut duties, now) = (Duties::default(), Instant::now());
        duties.follow(false, false, now);
        assert_eq!(duties.take_due(now), None);
        duties.follow(true, false, now);
        assert_eq!(duties.wake_at(now), None);
        duties.follow(false, false, now);
        assert_eq!(duties.wake_at(now), Some(now));
        assert_eq!(duties.take_due(now), Some(Duty::SetTime));
        assert_eq!(duties.take_due(now), None);
    }

    #[test]
    fn the_time_is_set_once_after_a_restore() {
        let now = Instant::now();
        let mut duties = Duties::new(true);
        // The VMM reports the port after the first events.
        duties.follow(false, false, now);
        duties.disconnected();
        assert_eq!(duties.take_due(now), None);
        duties.connected();
        assert_eq!(duties.take_due(now), Some(Duty::SetTime));
        duties.disconnected();
        duties.connected();
        assert_eq!(duties.take_due(now), None);
        // A guest that has booted since knows the time.
        let mut duties = Duties::new(true);
        duties.rebooted();
        duties.connected();
        assert_eq!(duties.take_due(now), None);
    }

    #[test]
    fn a_time_that_was_refused_is_set_after_the_thaw() {
        let (mut duties, now) = (Duties::new(true), Instant::now());
        duties.connected();
        assert_eq!(duties.take_due(now), Some(Duty::SetTime));
        duties.time_refused();
        assert_eq!(duties.take_due(now), None);
        duties.thawed();
        assert_eq!(duties.take_due(now), Some(Duty::SetTime));
        duties.thawed();
        assert_eq!(duties.take_due(now), None);
        duties.time_refused();
        duties.rebooted();
        duties.thawed();
        assert_eq!(duties.take_due(now), None);
    }

    #[test]
    fn the_agent_is_asked_if_the_power_button_has_no_effect() {
        let (mut duties, start) = (Duties::default(), Instant::now());
        duties.follow(false, true, start);
        assert_eq!(duties.take_due(start), None);
        let second = start + SHUTDOWN_EVERY;
        duties.follow(false, true, second);
        assert_eq!(duties.wake_at(second), Some(second));
        assert_eq!(duties.take_due(second), Some(Duty::ShutDown));
        assert_eq!(duties.take_due(second), None);
        assert_eq!(duties.take_due(second + SHUTDOWN_EVERY), Some(Duty::ShutDown));
        duties.follow(false, false, second);
        assert_eq!(duties.wake_at(second), None);
    }
}
