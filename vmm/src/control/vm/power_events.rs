//! Raises the interrupt of ACPI events again, while the guest does not read them.
//!
//! Before the guest has a driver for them the pin is masked, and the I/O APIC drops the edge: a NIC that is plugged
//! while the guest boots would stay unnoticed.

use std::time::Duration;

use husk_proto::vmm::v1::State;

use super::Vm;

/// Time between two interrupts.
const EVERY: Duration = Duration::from_secs(1);
/// Number of interrupts for a guest that has no driver.
const TIMES: u32 = 120;

impl Vm {
    /// Repeats the interrupt of the events that the guest has not read, for some time.
    pub(super) fn repeat_power_events(&mut self) {
        self.power_repeats_left = TIMES;
        (self.power_repeat.0)(Some(EVERY));
    }

    /// The time of the next interrupt has come. A VM that is paused starts again when it resumes.
    pub(super) fn power_repeat_due(&mut self) {
        let Some(running) = self.running.as_ref().filter(|_| self.state == State::Running) else {
            return;
        };
        match running.machine.repeat_power_events() {
            Ok(pending) => self.power_repeated(pending),
            Err(error) => tracing::warn!(%error, "cannot repeat the interrupt of ACPI events"),
        }
    }

    fn power_repeated(&mut self, pending: bool) {
        self.power_repeats_left = self.power_repeats_left.saturating_sub(1);
        if pending && self.power_repeats_left > 0 {
            (self.power_repeat.0)(Some(EVERY));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{messages_after, running, with_machine};
    use super::super::{Message, Vm};
    use super::*;

    /// True if the timer has rung.
    async fn rings(vm: &mut Vm) -> bool {
        let messages = messages_after(vm, EVERY * 2).await;
        matches!(messages[..], [Message::PowerRepeat])
    }

    #[tokio::test(start_paused = true)]
    async fn the_interrupt_is_repeated_for_two_minutes() {
        let mut vm = running();
        for _ in 1..TIMES {
            assert!(rings(&mut vm).await);
            vm.power_repeated(true);
        }
        assert!(rings(&mut vm).await);
        vm.power_repeated(true);
        assert!(!rings(&mut vm).await);
        vm.repeat_power_events();
        assert!(rings(&mut vm).await);
        vm.power_repeated(false);
        assert!(!rings(&mut vm).await, "the guest has read the events");
    }

    #[tokio::test(start_paused = true)]
    #[ignore = "needs /dev/kvm"]
    async fn a_press_is_repeated_while_the_vm_runs() {
        let mut vm = with_machine();
        assert!(rings(&mut vm).await);
        vm.power_repeat_due();
        assert!(!rings(&mut vm).await, "there is no event");
        vm.shut_down(false).unwrap();
        for _ in 0..2 {
            assert!(rings(&mut vm).await);
            vm.power_repeat_due();
        }
        vm.set_state(State::Paused);
        assert!(rings(&mut vm).await);
        vm.power_repeat_due();
        assert!(!rings(&mut vm).await);
        vm.set_state(State::Running);
        assert!(rings(&mut vm).await);
    }
}
