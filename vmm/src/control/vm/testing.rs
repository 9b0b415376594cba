//! VMs for unit tests.

use std::time::Duration;

use husk_proto::vmm::v1::State;
use tokio::sync::watch;

use super::{Message, Vm};
use crate::control::ports::PortStates;

/// A VM that runs, without a machine. Must be called on a runtime.
pub(super) fn running() -> Vm {
    let mut vm = Vm::new(watch::channel(PortStates::default()).0);
    vm.set_state(State::Running);
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
