//! Timers of the machine's clocks. They run on the runtime, and the machine's thread hears when one is due.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Sets a timer that rings after the time, in place of the one before; `None`: no timer.
pub(super) type SetTimer = Arc<dyn Fn(Option<Duration>) + Send + Sync>;

/// A [`SetTimer`] that can be debugged.
pub(super) struct Timer(pub SetTimer);

impl std::fmt::Debug for Timer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Timer")
    }
}

/// A timer that calls `ring` on the runtime of the caller. It ends when nobody can set it any more.
pub(super) fn timer(ring: impl Fn() + Send + 'static) -> SetTimer {
    let (sender, due) = watch::channel(None);
    tokio::spawn(serve(due, ring));
    Arc::new(move |time| {
        sender.send_replace(time.map(|time| Instant::now() + time));
    })
}

async fn serve(mut due: watch::Receiver<Option<Instant>>, ring: impl Fn()) {
    loop {
        let at = *due.borrow_and_update();
        let changed = match at {
            Some(at) => tokio::select! {
                () = sleep_until(at) => {
                    ring();
                    due.changed().await
                }
                changed = due.changed() => changed,
            },
            None => due.changed().await,
        };
        if changed.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_timer_rings_once_at_the_last_time_that_was_set() {
        let rings = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&rings);
        let set = timer(move || {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        let count = async |within: u64| {
            tokio::time::sleep(Duration::from_millis(within)).await;
            rings.load(Ordering::SeqCst)
        };
        set(Some(Duration::from_secs(3600)));
        assert_eq!(count(20).await, 0);
        set(Some(Duration::from_millis(1)));
        assert_eq!(count(100).await, 1);
        set(Some(Duration::from_millis(1)));
        assert_eq!(count(100).await, 2);
        set(Some(Duration::from_millis(50)));
        set(None);
        assert_eq!(count(150).await, 2);
    }
}
