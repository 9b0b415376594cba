//! The client of the API server. A connection may die without a word, so no answer is awaited for ever.

use std::time::Duration;

use kube::{Client, Config};

/// Maximum time without a byte from the API server. It ends a watch before, which lasts
/// [`WATCH_TIMEOUT`](crate::watching::WATCH_TIMEOUT).
const READ_TIMEOUT: Duration = match cfg!(test) {
    true => Duration::from_secs(2),
    false => Duration::from_secs(75),
};

/// A client by KUBECONFIG or by the service account of the agent's pod.
///
/// # Errors
/// There is no configuration, or it is not valid.
pub async fn connect() -> Result<Client, String> {
    let config = Config::infer()
        .await
        .map_err(|error| format!("no configuration for the API server (set KUBECONFIG): {error}"))?;
    with_timeouts(config).map_err(|error| format!("the API server: {error}"))
}

pub(crate) fn with_timeouts(mut config: Config) -> Result<Client, kube::Error> {
    config.read_timeout = Some(READ_TIMEOUT);
    // The time in which a connection had no request does not count.
    config.reset_reader_on_write = true;
    Client::try_from(config)
}
