//! A ready driver's queues: their kick events and doorbells, and their state while no device holds them.

use std::io;

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::layout;
use super::state::RingState;
use crate::doorbell::Doorbells;

/// The queues from DRIVER_OK to reset.
#[derive(Debug)]
pub(super) struct Rings {
    lines: Vec<Line>,
    /// The queues' state while the device is not active; none while it is.
    held: Option<Vec<RingState>>,
}

#[derive(Debug)]
struct Line {
    index: u16,
    kick: EventFd,
    doorbell: Option<u64>,
}

impl Rings {
    /// Queues that no device holds yet.
    pub fn new(states: Vec<RingState>) -> io::Result<Self> {
        let line = |ring: &RingState| {
            let kick = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
            Ok(Line {
                index: ring.index,
                kick,
                doorbell: None,
            })
        };
        let lines = states.iter().map(line).collect::<io::Result<_>>()?;
        Ok(Self {
            lines,
            held: Some(states),
        })
    }

    /// Whether no device holds the queues.
    pub fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// The queues' state, if no device holds them.
    pub fn held(&self) -> Option<&[RingState]> {
        self.held.as_deref()
    }

    /// Takes the queues' state, for the device to hold, each with a clone of its kick event.
    pub fn take(&mut self) -> io::Result<Vec<(RingState, EventFd)>> {
        let held = self.held.take().unwrap_or_default();
        held.into_iter()
            .zip(&self.lines)
            .map(|(ring, line)| Ok((ring, line.kick.try_clone()?)))
            .collect()
    }

    /// Whether these are states of the very same queues, in index order.
    pub fn fit(&self, states: &[RingState]) -> bool {
        states
            .iter()
            .map(|ring| ring.index)
            .eq(self.lines.iter().map(|line| line.index))
    }

    /// Takes queues that [`Rings::fit`] back.
    pub fn hold(&mut self, states: Vec<RingState>) {
        self.held = Some(states);
    }

    /// Makes every doorbell ring where the BAR is now; with none, nowhere. A doorbell that cannot be
    /// registered costs an exit per notification, nothing else.
    pub fn follow(&mut self, bar: Option<u64>, doorbells: &dyn Doorbells) {
        for line in &mut self.lines {
            let wanted = bar.and_then(|bar| bar.checked_add(layout::doorbell(line.index)));
            if wanted == line.doorbell {
                continue;
            }
            if let Some(old) = line.doorbell.take()
                && let Err(error) = doorbells.unregister(old, &line.kick)
            {
                tracing::warn!(%error, queue = line.index, address = old, "doorbell not removed");
            }
            match wanted.map(|address| doorbells.register(address, &line.kick)) {
                Some(Err(error)) => tracing::warn!(%error, queue = line.index, "doorbell not registered"),
                _ => line.doorbell = wanted,
            }
        }
    }

    /// Notifies one queue, as its doorbell does.
    pub fn kick(&self, queue: u16) {
        if let Some(line) = self.lines.iter().find(|line| line.index == queue) {
            // A full counter means that a notification is on its way already.
            let _ = line.kick.write(1);
        }
    }

    /// Notifies every queue: the driver may have added buffers that nobody was told of.
    pub fn kick_all(&self) {
        self.lines.iter().for_each(|line| self.kick(line.index));
    }
}
