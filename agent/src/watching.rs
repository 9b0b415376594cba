//! Delays, errors and the end of the agent's watches of the API server.

use std::time::Duration;

use kube::runtime::utils::ResetTimerBackoff;
use kube::runtime::watcher::{self, ExponentialBackoff};
use tokio::sync::watch;
use tracing::warn;

/// Time without an error after which the delays are short again. The beginning of a list is no success yet.
const RESET_AFTER: Duration = Duration::from_secs(30);

/// Time after which the API server ends a watch, in seconds. One that says nothing for longer is begun again.
pub const WATCH_TIMEOUT: u32 = 60;

/// The settings of a watch.
pub fn watch_config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_TIMEOUT)
}

/// Delays before a broken watch is repeated. Agents of a cluster do not repeat at the same time.
pub fn backoff() -> ResetTimerBackoff<ExponentialBackoff> {
    let delays = backon::ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(200))
        .with_max_delay(Duration::from_secs(5))
        .with_jitter()
        .without_max_times();
    ResetTimerBackoff::new(delays.into(), RESET_AFTER)
}

/// The last error of a watch, so that one that stays is logged once.
#[derive(Debug, Default)]
pub struct WatchError(Option<String>);

impl WatchError {
    /// Logs an error of the watch of `kind`, unless it is that of before.
    pub fn log(&mut self, kind: &str, error: &watcher::Error) {
        let text = error.to_string();
        if self.0.as_ref() != Some(&text) {
            warn!(kind, error = text, "a watch was interrupted");
            self.0 = Some(text);
        }
    }

    /// The watch works.
    pub fn clear(&mut self) {
        self.0 = None;
    }
}

/// Returns when `stop` is true.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
