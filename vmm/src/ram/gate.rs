//! Ends the reading of guest memory by threads that copy it.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// Stops a copy of guest memory: each read needs a guard of the gate, and a closed gate
/// gives none.
#[derive(Debug, Default)]
pub struct CopyGate(RwLock<bool>);

impl CopyGate {
    /// Begins a read, which lasts as long as the result lives; `None` if the gate is closed.
    pub(super) fn enter(&self) -> Option<RwLockReadGuard<'_, bool>> {
        let closed = self.0.read().unwrap_or_else(PoisonError::into_inner);
        (!*closed).then_some(closed)
    }

    /// Closes the gate. Returns when the reads under way have ended. Blocks: the memory of a restored VM may
    /// have to be read from its file.
    pub fn close(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// True once it is closed.
    pub fn is_closed(&self) -> bool {
        *self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn closing_waits_for_reads_and_prevents_more() {
        let gate = CopyGate::default();
        let reading = gate.enter().unwrap();
        let (closed, news) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                gate.close();
                closed.send(()).unwrap();
            });
            let early = news.recv_timeout(Duration::from_millis(100));
            assert_eq!(early, Err(RecvTimeoutError::Timeout));
            drop(reading);
            news.recv().unwrap();
        });
        assert!(gate.is_closed() && gate.enter().is_none());
    }
}
