//! Disks that hold failed requests.

use std::collections::btree_map::Entry;

use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::{self as pb, PauseReason};

use super::{Vm, VmExit};

fn io_error(disk: &str, message: &str) -> Kind {
    Kind::IoError(pb::event::IoError {
        disk: disk.to_owned(),
        message: message.to_owned(),
    })
}

impl Vm {
    /// Pauses the VM for a disk that holds failed requests. A resume retries them. Each queue of the disk may report
    /// that it has stopped: the monitor is told once.
    pub(super) fn disk_stopped(&mut self, disk: String, message: String) -> Option<VmExit> {
        if let Entry::Vacant(first) = self.stopped_disks.entry(disk) {
            tracing::warn!(disk = first.key(), error = message, "I/O error: pausing the VM");
            self.events.emit(io_error(first.key(), &message));
            first.insert(message);
        }
        self.pause_or_defer(PauseReason::IoError)
    }

    /// An event for each of the disks.
    pub(super) fn io_errors(&self) -> impl Iterator<Item = Kind> {
        let disks = self.stopped_disks.iter();
        disks.map(|(disk, message)| io_error(disk, message))
    }
}

#[cfg(test)]
mod tests {
    use husk_proto::vmm::v1::State;
    use tokio::sync::broadcast::Receiver;

    use super::super::testing::running;
    use super::*;

    fn emitted(events: &mut Receiver<pb::Event>) -> Vec<Kind> {
        std::iter::from_fn(|| events.try_recv().ok()?.event).collect()
    }

    #[tokio::test]
    async fn a_disk_is_reported_once_until_the_vm_runs_again() {
        let mut vm = running();
        let mut events = vm.events.subscribe();
        for round in 0..2 {
            for queue in 0..100 {
                for disk in ["root", "data"] {
                    assert_eq!(vm.disk_stopped(disk.into(), format!("error {queue}")), None);
                }
            }
            let paused = Kind::State(State::Paused.into());
            let expected = [io_error("root", "error 0"), paused, io_error("data", "error 0")];
            assert_eq!(emitted(&mut events), expected, "{round}");
            vm.set_state(State::Running);
            assert_eq!(emitted(&mut events), [Kind::State(State::Running.into())]);
        }
    }

    #[tokio::test]
    async fn a_new_subscriber_learns_what_holds_already() {
        let mut vm = running();
        let present =
            |vm: &Vm| -> Vec<_> { vm.present().into_iter().filter_map(|event| event.event).collect() };
        assert_eq!(present(&vm), [Kind::State(State::Running.into())]);
        vm.boots = 4;
        vm.disk_stopped("root".into(), "full".into());
        vm.pause_or_defer(PauseReason::Watchdog);
        let bite = pb::event::WatchdogBite {
            action: pb::watchdog::Action::Pause.into(),
        };
        let expected = [
            Kind::State(State::Paused.into()),
            Kind::Resets(3),
            io_error("root", "full"),
            Kind::Watchdog(bite),
        ];
        assert_eq!(present(&vm), expected);
    }
}
