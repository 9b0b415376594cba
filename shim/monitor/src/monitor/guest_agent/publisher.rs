//! Publishes the state that a VMI's status shows. Each change becomes a write to a cluster's API server, so a guest that changes
//! all the time is slowed down.

use std::time::{Duration, Instant};

use husk_proto::shim::v1::GuestState;
use tokio::sync::watch;

/// Shortest time between two changes.
const INTERVAL: Duration = Duration::from_secs(2);

pub(super) struct StatePublisher {
    state: watch::Sender<GuestState>,
    /// When a state that waits may be published.
    next: Option<Instant>,
    changed_at: Option<Instant>,
}

impl StatePublisher {
    pub(super) fn new() -> (StatePublisher, watch::Receiver<GuestState>) {
        let (state, published) = watch::channel(GuestState::default());
        let publisher = StatePublisher {
            state,
            next: None,
            changed_at: None,
        };
        (publisher, published)
    }

    /// Publishes a state that is new, now or later.
    pub(super) fn show(&mut self, state: GuestState, now: Instant) {
        self.next = None;
        if *self.state.borrow() == state {
            return;
        }
        match self.changed_at.map(|changed| changed + INTERVAL) {
            Some(at) if at > now => self.next = Some(at),
            _ => {
                self.changed_at = Some(now);
                self.state.send_replace(state);
            }
        }
    }

    /// When [`StatePublisher::show`] is to be called again.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_in_a_row_wait() {
        let (mut publisher, published) = StatePublisher::new();
        let (start, later) = (Instant::now(), Instant::now() + INTERVAL);
        let state = |connected| GuestState {
            connected,
            ..GuestState::default()
        };
        publisher.show(state(true), start);
        assert!(published.borrow().connected);
        assert_eq!(publisher.wake_at(), None);
        publisher.show(state(false), start);
        assert!(published.borrow().connected);
        assert_eq!(publisher.wake_at(), Some(start + INTERVAL));
        // It is as before again.
        publisher.show(state(true), start);
        assert_eq!(publisher.wake_at(), None);
        publisher.show(state(false), later);
        assert!(!published.borrow().connected);
    }
}
