//! Memory of the process's allocator.

use std::time::Duration;

use husk_proto::shim::v1::{Phase, Status};
use tokio::sync::watch;
use tokio::time::sleep;

/// Time for the work that follows the start of a VM.
const SETTLED: Duration = Duration::from_secs(5);

/// Lets all threads share one arena of the allocator, which saves time and memory where they hardly allocate. Call it
/// before there are several.
pub(super) fn share_arena() {
    // SAFETY: mallopt(3) may be called while no other thread runs. It fails only for an unknown parameter.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Returns to the kernel the memory that the start of the VM has freed: the process lives as long as the VM.
pub(super) async fn trim_after_start(mut status: watch::Receiver<Status>) {
    let running = |status: &Status| status.phase() == Phase::Running;
    if status.wait_for(running).await.is_ok() {
        sleep(SETTLED).await;
        // SAFETY: malloc_trim(3) may be called at any time and by any thread.
        unsafe { libc::malloc_trim(0) };
    }
}
