//! Messages to the machine's thread.

use std::collections::VecDeque;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::boot::{BootError, LoadedKernel};
use crate::control::service::VmmCommand;
use crate::machine::VmEvent;

/// A message to the machine's thread.
#[derive(Debug)]
pub(in crate::control) enum Message {
    /// A call of the monitor.
    Command(VmmCommand),
    /// An event of the machine.
    Event(VmEvent),
    /// The RTC's alarm is due.
    RtcAlarm,
    /// The watchdog's timer has run out.
    WatchdogAlarm,
    /// A reset or a pause that was not possible is to be tried again.
    Retry,
    /// The interrupt of power events is to be raised again.
    PowerRepeat,
    /// The kernel was loaded, or not.
    Loaded(Result<LoadedKernel, BootError>),
    /// The monitor is gone.
    ControlClosed,
}

impl Message {
    /// True for a message that ends the VM, whatever its state.
    fn is_end(&self) -> bool {
        matches!(self, Self::Command(VmmCommand::Stop(_)) | Self::ControlClosed)
    }
}

/// The receiving end.
#[derive(Debug)]
pub(super) struct Mailbox {
    receiver: mpsc::Receiver<Message>,
    /// Messages that came while the thread waited for another.
    waiting: VecDeque<Message>,
}

impl Mailbox {
    pub(super) fn new() -> (mpsc::Sender<Message>, Self) {
        let (sender, receiver) = mpsc::channel();
        let waiting = VecDeque::new();
        (sender, Self { receiver, waiting })
    }

    /// Waits for the next message. `None` if there will be none.
    pub(super) fn next(&mut self) -> Option<Message> {
        self.waiting.pop_front().or_else(|| self.receiver.recv().ok())
    }

    /// Waits for [`Message::Loaded`] or one that ends the VM; others stay. `None` if neither comes within `limit`.
    pub(super) fn loaded_or_end(&mut self, limit: Duration) -> Option<Message> {
        if let Some(at) = self.waiting.iter().position(Message::is_end) {
            return self.waiting.remove(at);
        }
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let message = self.receiver.recv_timeout(left).ok()?;
            if message.is_end() || matches!(message, Message::Loaded(_)) {
                return Some(message);
            }
            self.waiting.push_back(message);
        }
    }

    /// Drops the events and alarms that wait.
    pub(super) fn drop_events(&mut self) {
        self.waiting.extend(self.receiver.try_iter());
        let stays = |message: &Message| matches!(message, Message::Command(_) | Message::ControlClosed);
        self.waiting.retain(stays);
    }
}

#[cfg(test)]
mod tests {
    use husk_proto::vmm::v1::PauseReason;
    use tokio::sync::oneshot;

    use super::*;

    fn stop() -> Message {
        Message::Command(VmmCommand::Stop(oneshot::channel().0))
    }

    fn pause() -> Message {
        Message::Command(VmmCommand::Pause(PauseReason::User, oneshot::channel().0))
    }

    #[test]
    fn what_comes_while_a_kernel_is_loaded_is_served_later_except_the_end() {
        let (sender, mut mailbox) = Mailbox::new();
        for message in [
            pause(),
            Message::RtcAlarm,
            stop(),
            Message::Event(VmEvent::Ejected),
        ] {
            sender.send(message).unwrap();
        }
        assert!(mailbox.loaded_or_end(Duration::from_secs(60)).unwrap().is_end());
        assert!(mailbox.loaded_or_end(Duration::ZERO).is_none());
        let kinds: Vec<_> = (0..3).map(|_| mailbox.next().unwrap()).collect();
        assert!(
            matches!(
                kinds[..],
                [
                    Message::Command(VmmCommand::Pause(..)),
                    Message::RtcAlarm,
                    Message::Event(VmEvent::Ejected)
                ]
            ),
            "{kinds:?}"
        );
    }

    #[test]
    fn a_reset_drops_events_and_keeps_commands() {
        let (sender, mut mailbox) = Mailbox::new();
        for message in [
            Message::Event(VmEvent::Ejected),
            pause(),
            Message::WatchdogAlarm,
            stop(),
        ] {
            sender.send(message).unwrap();
        }
        mailbox.drop_events();
        // The end does not wait for the kernel, though it came before.
        assert!(mailbox.loaded_or_end(Duration::ZERO).unwrap().is_end());
        assert!(matches!(
            mailbox.next(),
            Some(Message::Command(VmmCommand::Pause(..)))
        ));
        drop(sender);
        assert!(mailbox.next().is_none());
    }
}
