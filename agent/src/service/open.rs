//! The open connections of a service. At the limit, the oldest one without a request is closed for a new one, so that
//! idle clients keep nobody out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;
use tokio::task::AbortHandle;

/// The open connections, oldest first.
#[derive(Debug)]
pub(super) struct OpenConnections {
    limit: usize,
    connections: VecDeque<(Requests, AbortHandle)>,
    /// A request has been answered, or a connection has ended.
    changed: Arc<Notify>,
}

/// The number of requests of a connection that have no answer yet.
#[derive(Debug, Clone)]
pub(super) struct Requests {
    count: Arc<AtomicUsize>,
    changed: Arc<Notify>,
}

/// A request, until the value is dropped.
#[derive(Debug)]
pub(super) struct Unanswered(Requests);

impl OpenConnections {
    pub(super) fn new(limit: usize) -> OpenConnections {
        OpenConnections {
            limit,
            connections: VecDeque::new(),
            changed: Arc::default(),
        }
    }

    /// Makes room for a new connection: closes the oldest one without a request, or waits for one.
    pub(super) async fn make_room(&mut self) {
        loop {
            self.connections.retain(|(_, task)| !task.is_finished());
            if self.connections.len() < self.limit {
                return;
            }
            let mut connections = self.connections.iter();
            let idle = connections.position(|(requests, _)| requests.count.load(Ordering::Relaxed) == 0);
            match idle.and_then(|at| self.connections.remove(at)) {
                Some((_, task)) => task.abort(),
                None => self.changed.notified().await,
            }
        }
    }

    /// The requests of a new connection, which [`OpenConnections::add`] takes.
    pub(super) fn requests(&self) -> Requests {
        Requests {
            count: Arc::default(),
            changed: Arc::clone(&self.changed),
        }
    }

    /// Adds a connection that a task serves.
    pub(super) fn add(&mut self, requests: Requests, task: AbortHandle) {
        self.connections.push_back((requests, task));
    }
}

impl Requests {
    /// A request begins.
    pub(super) fn begin(&self) -> Unanswered {
        self.count.fetch_add(1, Ordering::Relaxed);
        Unanswered(self.clone())
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
        self.0.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    fn connect(open: &mut OpenConnections) -> (Requests, tokio::task::JoinHandle<()>) {
        let (requests, task) = (open.requests(), tokio::spawn(pending()));
        open.add(requests.clone(), task.abort_handle());
        (requests, task)
    }

    #[tokio::test(start_paused = true)]
    async fn oldest_connection_without_a_request_makes_way() {
        let mut open = OpenConnections::new(3);
        let (first, first_task) = connect(&mut open);
        let (_, second_task) = connect(&mut open);
        let (third, third_task) = connect(&mut open);
        let asked = first.begin();
        let second = Duration::from_secs(1);
        timeout(second, open.make_room()).await.unwrap();
        assert!(second_task.await.unwrap_err().is_cancelled());
        let (fourth, _fourth_task) = connect(&mut open);
        let others = [third.begin(), fourth.begin()];
        assert!(timeout(second, open.make_room()).await.is_err());
        drop(asked);
        timeout(second, open.make_room()).await.unwrap();
        assert!(first_task.await.unwrap_err().is_cancelled());
        assert!(!third_task.is_finished());
        drop(others);
    }
}
