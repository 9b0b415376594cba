//! The reasons for which a VM is paused. It runs only if there is none.

use husk_proto::vmm::v1::{PauseReason, State};
use tonic::Status;

use super::{Vm, failed, wrong_state};
use crate::machine::MachineError;

/// A set of reasons.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PauseReasons(u8);

impl PauseReasons {
    const ALL: [PauseReason; 4] = [
        PauseReason::User,
        PauseReason::IoError,
        PauseReason::Watchdog,
        PauseReason::Snapshot,
    ];

    fn bit(reason: PauseReason) -> u8 {
        match reason {
            PauseReason::Unspecified | PauseReason::User => 1,
            PauseReason::IoError => 1 << 1,
            PauseReason::Watchdog => 1 << 2,
            PauseReason::Snapshot => 1 << 3,
        }
    }

    /// Adds a reason.
    pub(super) fn insert(&mut self, reason: PauseReason) {
        self.0 |= Self::bit(reason);
    }

    /// Adds the reasons of another set, which is empty afterwards.
    pub(super) fn append(&mut self, other: &mut Self) {
        self.0 |= std::mem::take(other).0;
    }

    /// True if the VM is paused for this reason.
    pub(super) fn contains(self, reason: PauseReason) -> bool {
        self.0 & Self::bit(reason) != 0
    }

    /// True if there is no reason.
    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The set as it is when `reason` is taken back. A user takes back all but a snapshot's.
    fn without(self, reason: PauseReason) -> Self {
        match reason {
            PauseReason::Snapshot | PauseReason::IoError => Self(self.0 & !Self::bit(reason)),
            _ => Self(self.0 & Self::bit(PauseReason::Snapshot)),
        }
    }

    /// The reasons.
    pub(super) fn iter(self) -> impl Iterator<Item = PauseReason> {
        Self::ALL.into_iter().filter(move |reason| self.contains(*reason))
    }
}

impl Vm {
    /// Pauses the VM for a reason, or adds a reason to be paused.
    pub(super) fn pause(&mut self, reason: PauseReason) -> Result<(), Status> {
        match self.state {
            State::Running | State::Paused => self.try_pause(reason).map_err(failed),
            state => Err(wrong_state(state)),
        }
    }

    /// As [`Vm::pause`], for a VM that was booted.
    pub(super) fn try_pause(&mut self, reason: PauseReason) -> Result<(), MachineError> {
        if self.state == State::Running {
            if let Some(running) = &mut self.running {
                running.machine.pause()?;
            }
            self.set_state(State::Paused);
        }
        self.pause_reasons.insert(reason);
        self.pause_reasons.append(&mut self.deferred_pauses);
        self.end_left_log()
    }

    /// Takes a reason back, and resumes the VM if it was the last one.
    pub(super) fn resume(&mut self, reason: PauseReason) -> Result<(), Status> {
        self.check_not_saving()?;
        if reason == PauseReason::Snapshot {
            self.end_precopy()?;
        }
        let left = self.pause_reasons.without(reason);
        match (self.state, self.running.as_mut()) {
            (State::Running, _) => Ok(()),
            (State::Paused, Some(_)) if !left.is_empty() && reason != PauseReason::Snapshot => {
                Err(Status::failed_precondition(match reason {
                    PauseReason::IoError => "the VM is paused for another reason too",
                    _ => {
                        self.pause_reasons = left;
                        "a snapshot of the VM is being saved: it resumes after that"
                    }
                }))
            }
            (State::Paused, Some(running)) => {
                if left.is_empty() {
                    running.machine.run().map_err(failed)?;
                    self.set_state(State::Running);
                }
                self.pause_reasons = left;
                Ok(())
            }
            (state, _) => Err(wrong_state(state)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_takes_back_all_but_a_snapshots_reason() {
        let mut reasons = PauseReasons::default();
        for reason in PauseReasons::ALL {
            reasons.insert(reason);
        }
        assert_eq!(reasons.iter().collect::<Vec<_>>(), PauseReasons::ALL);
        let snapshot = reasons.without(PauseReason::User);
        assert_eq!(snapshot.iter().collect::<Vec<_>>(), [PauseReason::Snapshot]);
        assert_eq!(snapshot.without(PauseReason::Unspecified), snapshot);
        assert!(snapshot.without(PauseReason::Snapshot).is_empty());
    }

    #[test]
    fn a_snapshot_and_a_retry_take_back_their_own_reason() {
        let mut reasons = PauseReasons::default();
        for reason in PauseReasons::ALL {
            reasons.insert(reason);
        }
        for reason in [PauseReason::Snapshot, PauseReason::IoError] {
            let left: Vec<_> = reasons.without(reason).iter().collect();
            let others: Vec<_> = PauseReasons::ALL.into_iter().filter(|r| *r != reason).collect();
            assert_eq!(left, others);
        }
    }
}
