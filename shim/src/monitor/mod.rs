//! The background half of `husk run`: owns one VM until it ends.

use std::process::ExitCode;

use crate::launch::Report;

/// The monitor's `main`, for a program started by [`crate::launch::launch`]: reads its configuration from standard
/// input, leaves the caller's session, reports on standard output and returns when the VM has ended.
///
/// Must be called before any thread is started. Logs go through `tracing` to standard error, which becomes the
/// VM's monitor.log as soon as there is one.
pub fn serve() -> ExitCode {
    let report = Report::Failed {
        reason: "StartFailed".into(),
        message: "there is no VMM yet".into(),
    };
    println!("{}", serde_json::to_string(&report).unwrap_or_default());
    ExitCode::FAILURE
}
