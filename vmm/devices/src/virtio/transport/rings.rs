//! The queues of a driver: their kick events and ioeventfds, and their state while the device does not own them.

use std::io;

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::layout;
use super::state::RingState;
use crate::ioeventfd::IoEventFds;

/// The queues from DRIVER_OK to reset.
#[derive(Debug)]
pub(super) struct QueueRings {
    notifiers: Vec<QueueNotifier>,
    /// State of the queues while the device is not active; `None` while it is.
    parked: Option<Vec<RingState>>,
}

#[derive(Debug)]
struct QueueNotifier {
    index: u16,
    kick: EventFd,
    ioeventfd: Option<u64>,
}

impl QueueRings {
    /// Queues that the device does not own yet.
    pub fn new(states: Vec<RingState>) -> io::Result<Self> {
        let notifier = |ring: &RingState| {
            let kick = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
            Ok(QueueNotifier {
                index: ring.index,
                kick,
                ioeventfd: None,
            })
        };
        let notifiers = states.iter().map(notifier).collect::<io::Result<_>>()?;
        Ok(Self {
            notifiers,
            parked: Some(states),
        })
    }

    /// True if the device does not own the queues.
    pub fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// State of the queues, if the device does not own them.
    pub fn parked(&self) -> Option<&[RingState]> {
        self.parked.as_deref()
    }

    /// Takes the state of the queues for the device, each with a clone of its kick event.
    pub fn unpark(&mut self) -> io::Result<Vec<(RingState, EventFd)>> {
        let parked = self.parked.take().unwrap_or_default();
        parked
            .into_iter()
            .zip(&self.notifiers)
            .map(|(ring, notifier)| Ok((ring, notifier.kick.try_clone()?)))
            .collect()
    }

    /// True if these are states of the same queues, in index order.
    pub fn matches(&self, states: &[RingState]) -> bool {
        states
            .iter()
            .map(|ring| ring.index)
            .eq(self.notifiers.iter().map(|notifier| notifier.index))
    }

    /// Takes back the state of queues for which [`QueueRings::matches`] is true.
    pub fn park(&mut self, states: Vec<RingState>) {
        self.parked = Some(states);
    }

    /// Registers each ioeventfd at the current address of the BAR, or unregisters them for `None`. Without its
    /// ioeventfd, a notification costs an exit and still arrives.
    pub fn update_ioeventfds(&mut self, bar: Option<u64>, ioeventfds: &dyn IoEventFds) {
        for notifier in &mut self.notifiers {
            let wanted = bar.and_then(|bar| bar.checked_add(layout::notify_address(notifier.index)));
            if wanted == notifier.ioeventfd {
                continue;
            }
            if let Some(old) = notifier.ioeventfd.take()
                && let Err(error) = ioeventfds.unregister(old, &notifier.kick)
            {
                tracing::warn!(%error, queue = notifier.index, address = old, "ioeventfd not unregistered");
            }
            match wanted.map(|address| ioeventfds.register(address, &notifier.kick)) {
                Some(Err(error)) => {
                    tracing::warn!(%error, queue = notifier.index, "ioeventfd not registered")
                }
                _ => notifier.ioeventfd = wanted,
            }
        }
    }

    /// Notifies one queue, as its ioeventfd does.
    pub fn kick(&self, queue: u16) {
        if let Some(notifier) = self.notifiers.iter().find(|notifier| notifier.index == queue) {
            // A full counter means that a notification is already pending.
            let _ = notifier.kick.write(1);
        }
    }

    /// Notifies every queue: the driver may have added buffers without a notification.
    pub fn kick_all(&self) {
        self.notifiers
            .iter()
            .for_each(|notifier| self.kick(notifier.index));
    }
}
