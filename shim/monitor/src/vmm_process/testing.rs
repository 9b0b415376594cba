//! What a VMM says at its end, for fuzz targets.

use std::process::ExitStatus;

use tokio::io::AsyncRead;

use super::{VmmExit, log};

/// Logs a VMM's standard error. Returns the last error in it.
pub async fn relay(stderr: impl AsyncRead + Unpin) -> Option<String> {
    log::relay(Some(stderr)).await
}

/// The exit of a VMM with this status, whose log had this last error.
#[must_use]
pub fn exit(status: ExitStatus, last_error: Option<String>) -> VmmExit {
    VmmExit::from_status(status, last_error)
}
