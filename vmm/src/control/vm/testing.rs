//! VMs for unit tests.

use std::sync::Arc;
use std::time::Duration;

use husk_proto::vmm::v1::State;
use tokio::sync::watch;

use super::{Message, RunningVm, Vm};
use crate::boot::KernelSource;
use crate::control::console::Console;
use crate::control::ports::PortStates;
use crate::machine::{eventfd, testing};

/// A VM that runs, without a machine. Must be called on a runtime.
pub(super) fn running() -> Vm {
    let mut vm = Vm::new(watch::channel(PortStates::default()).0);
    vm.set_state(State::Running);
    vm
}

/// A VM that runs, with a machine on the host's /dev/kvm whose vCPU stands still.
pub(super) fn with_machine() -> Vm {
    let machine = testing::machine();
    let console = Console::spawn(
        machine.serial().clone(),
        None,
        eventfd().unwrap(),
        eventfd().unwrap(),
    );
    let source = KernelSource::Disks {
        disks: vec![],
        append: String::new(),
    };
    let mut vm = running();
    vm.running = Some(RunningVm {
        machine,
        source: Arc::new(source),
        console: console.unwrap(),
        watchdog: None,
        restored: None,
    });
    vm
}

/// The messages that are there after this time.
pub(super) async fn messages_after(vm: &mut Vm, time: Duration) -> Vec<Message> {
    tokio::time::sleep(time).await;
    vm.messages.send(Message::RtcAlarm).unwrap();
    let messages = std::iter::from_fn(|| vm.mailbox.next());
    let messages = messages.take_while(|message| !matches!(message, Message::RtcAlarm));
    messages.collect()
}
