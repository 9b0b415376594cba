//! Events of the VM for the monitor.

use std::time::Duration;

use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::{self as pb, State};
use tokio::sync::broadcast;

use super::vm::VmExit;

/// Number of events that a subscriber may fall behind.
const CAPACITY: usize = 64;

fn now_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // Not with rustix, which looks for the vDSO with a prctl(2) that the seccomp filters forbid.
    // SAFETY: the call writes one timespec. The clock exists, so it does not fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32).as_nanos() as u64
}

/// An event that happens now.
pub(super) fn event(kind: Kind) -> pb::Event {
    pb::Event {
        monotonic_ns: now_ns(),
        event: Some(kind),
    }
}

/// The sender of the events. The streams of events end with it.
#[derive(Debug)]
pub(super) struct Events(broadcast::Sender<pb::Event>);

impl Events {
    pub(super) fn new() -> Self {
        Self(broadcast::Sender::new(CAPACITY))
    }

    pub(super) fn emit(&self, kind: Kind) {
        // Fails if there is no subscriber.
        let _ = self.0.send(event(kind));
    }

    pub(super) fn subscribe(&self) -> broadcast::Receiver<pb::Event> {
        self.0.subscribe()
    }

    /// Sends the last event.
    pub(super) fn end(self, exit: &VmExit) {
        self.emit(Kind::State(State::Stopped.into()));
        tracing::info!(
            reason = exit.reason.as_str_name(),
            detail = exit.detail,
            "VM ended"
        );
        self.emit(Kind::Exit(pb::event::Exit {
            reason: exit.reason.into(),
            detail: exit.detail.clone(),
        }));
    }
}
