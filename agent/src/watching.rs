//! What all long-running parts of the agent share.

use std::time::Duration;

use kube::runtime::watcher::ExponentialBackoff;
use tokio::sync::watch;

/// Delays before a broken watch is repeated. Agents of a cluster do not repeat at the same time.
pub fn backoff() -> ExponentialBackoff {
    backon::ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(200))
        .with_max_delay(Duration::from_secs(5))
        .with_jitter()
        .without_max_times()
        .into()
}

/// Returns when `stop` is true.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
