//! Snapshots that can be restored only if their VM does not go on.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use crate::monitor::disks::GrowthLock;
use crate::monitor::vm_error::VmError;
use crate::snapshot::{SnapshotDir, SnapshotError};

/// Maximum time for the storage of the snapshots to record that their VM goes on.
const TOLD_WITHIN: Duration = Duration::from_secs(10);

/// A snapshot that can be restored only if the VM does not go on.
#[derive(Clone)]
pub(super) struct FragileSnapshot {
    dir: Arc<SnapshotDir>,
    /// A volume outside of the snapshot must not change, so its image grows only when the VM goes on.
    _sizes_stay: GrowthLock,
}

impl FragileSnapshot {
    pub(super) fn new(dir: Arc<SnapshotDir>, sizes_stay: GrowthLock) -> FragileSnapshot {
        FragileSnapshot {
            dir,
            _sizes_stay: sizes_stay,
        }
    }
}

/// Those of one pause.
#[derive(Default)]
pub(super) struct FragileSnapshots {
    snapshots: Vec<FragileSnapshot>,
    /// Tells the first ones. Returns their number. On storage that hangs it outlives the resume that began it.
    telling: Option<JoinHandle<Result<usize, VmError>>>,
}

impl FragileSnapshots {
    pub(super) fn extend(&mut self, made: Option<FragileSnapshot>) {
        self.snapshots.extend(made);
    }

    /// Records in all of them that their VM goes on, and forgets them.
    ///
    /// # Errors
    /// One cannot be told, so the VM may not go on.
    pub(super) async fn tell(&mut self) -> Result<(), VmError> {
        let deadline = Instant::now() + TOLD_WITHIN;
        while !self.snapshots.is_empty() {
            let is_new = self.telling.is_none();
            let telling = self.telling.get_or_insert_with(|| {
                let snapshots = self.snapshots.clone();
                spawn_blocking(move || mark_resumed(&snapshots))
            });
            let Ok(told) = timeout_at(deadline, telling).await else {
                return Err(self.hang());
            };
            self.telling = None;
            match told {
                Ok(Ok(told)) => drop(self.snapshots.drain(..told)),
                // That was the answer to another resume.
                _ if !is_new => {}
                Ok(Err(error)) => return Err(error),
                Err(error) => return Err(VmError::internal(error.to_string())),
            }
        }
        Ok(())
    }

    /// The error of storage that does not answer.
    fn hang(&self) -> VmError {
        let paths = self.snapshots.iter().map(|snapshot| snapshot.dir.path());
        let paths: Vec<String> = paths.map(|path| path.display().to_string()).collect();
        let text = format!(
            "the VM may not go on before its snapshot knows, but the storage of {} has not answered within {} s: try \
             again when it does, or end the VM with `husk stop --force`",
            paths.join(", "),
            TOLD_WITHIN.as_secs()
        );
        warn!(text, "not resumed");
        VmError::wrong_state(text)
    }
}

/// Records in snapshots that their VM goes on, and returns their number. Blocks.
fn mark_resumed(snapshots: &[FragileSnapshot]) -> Result<usize, VmError> {
    for FragileSnapshot { dir: snapshot, .. } in snapshots {
        match snapshot.mark_resumed() {
            Ok(()) => info!(
                directory = %snapshot.path().display(),
                "the snapshot cannot be restored any more, since its VM goes on"
            ),
            Err(SnapshotError::Consumed {
                directory, volume, ..
            }) => {
                let text = format!(
                    "the snapshot {} was restored, and volume {volume:?} belongs to that VM now: end this one with \
                     `husk stop --force`",
                    directory.display()
                );
                return Err(VmError::wrong_state(text));
            }
            Err(error) => {
                let mut text = format!("the VM may not go on before its snapshot knows: {error}");
                // That error names its own way out.
                if !matches!(error, SnapshotError::InUse(_)) {
                    text += &format!(": remove {}", snapshot.path().display());
                }
                warn!(text, "not resumed");
                return Err(VmError::wrong_state(text));
            }
        }
    }
    Ok(snapshots.len())
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn storage_that_hangs_refuses_a_resume_in_time() {
        let directory = tempfile::tempdir().unwrap();
        let dir = Arc::new(SnapshotDir::open(directory.path()).unwrap());
        let (answer, answered) = oneshot::channel();
        let mut fragile = FragileSnapshots::default();
        fragile.extend(Some(FragileSnapshot::new(dir, GrowthLock::default())));
        fragile.telling = Some(tokio::spawn(async { answered.await.unwrap() }));
        let told = timeout(TOLD_WITHIN * 2, fragile.tell()).await.unwrap();
        let text = told.unwrap_err().to_string();
        let wanted = format!("the storage of {} has not answered", directory.path().display());
        assert!(text.contains(&wanted), "{text}");
        // Another resume asks again when it answers. This one finds no snapshot any more, which needs no mark.
        answer.send(Err(VmError::internal("late"))).unwrap();
        fragile.tell().await.unwrap();
        assert!(fragile.snapshots.is_empty());
    }
}
