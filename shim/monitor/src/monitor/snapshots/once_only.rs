//! Once-only snapshots: they can be restored only if their VM does not resume.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use crate::monitor::disks::GrowthLock;
use crate::monitor::vm_error::VmError;
use crate::snapshot::{SnapshotDir, SnapshotError};

/// Maximum time to mark the snapshots.
const MARKED_WITHIN: Duration = Duration::from_secs(10);

/// A snapshot that can be restored only if the VM does not resume.
#[derive(Clone)]
pub(super) struct OnceOnlySnapshot {
    dir: Arc<SnapshotDir>,
    /// A volume outside of the snapshot must not change, so its image grows only when the VM resumes.
    _sizes_stay: GrowthLock,
}

impl OnceOnlySnapshot {
    pub(super) fn new(dir: Arc<SnapshotDir>, sizes_stay: GrowthLock) -> OnceOnlySnapshot {
        OnceOnlySnapshot {
            dir,
            _sizes_stay: sizes_stay,
        }
    }
}

/// The once-only snapshots of one pause.
#[derive(Default)]
pub(super) struct OnceOnlySnapshots {
    snapshots: Vec<OnceOnlySnapshot>,
    /// The mark under way. Its result is the number of snapshots that it marked, from the first. If the storage hangs,
    /// it continues after the resume has failed.
    marking: Option<JoinHandle<Result<usize, VmError>>>,
}

impl OnceOnlySnapshots {
    pub(super) fn extend(&mut self, made: Option<OnceOnlySnapshot>) {
        self.snapshots.extend(made);
    }

    /// Marks all of them as unusable, because their VM resumes, and forgets them.
    ///
    /// # Errors
    /// One cannot be marked, so the VM must not resume.
    pub(super) async fn mark_resumed(&mut self) -> Result<(), VmError> {
        let deadline = Instant::now() + MARKED_WITHIN;
        while !self.snapshots.is_empty() {
            let is_new = self.marking.is_none();
            let marking = self.marking.get_or_insert_with(|| {
                let snapshots = self.snapshots.clone();
                spawn_blocking(move || mark_resumed(&snapshots))
            });
            let Ok(marked) = timeout_at(deadline, marking).await else {
                return Err(self.hang());
            };
            self.marking = None;
            match marked {
                Ok(Ok(marked)) => drop(self.snapshots.drain(..marked)),
                // The error is that of an earlier resume: mark again.
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
            "cannot resume: the VM's once-only snapshot must be marked as unusable first, but the storage of {} has not \
             answered within {} s: try again when it does. If you end the VM with `husk stop --force`, the snapshot may \
             be unusable too",
            paths.join(", "),
            MARKED_WITHIN.as_secs()
        );
        warn!(text, "not resumed");
        VmError::wrong_state(text)
    }
}

/// Marks snapshots as unusable, and returns their number. Blocks.
fn mark_resumed(snapshots: &[OnceOnlySnapshot]) -> Result<usize, VmError> {
    for OnceOnlySnapshot { dir: snapshot, .. } in snapshots {
        match snapshot.mark_resumed() {
            Ok(()) => info!(
                directory = %snapshot.path().display(),
                "the snapshot is unusable now, because its VM resumes"
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
                let mut text = format!(
                    "cannot resume: the VM's once-only snapshot cannot be marked as unusable: {error}"
                );
                // That error names its own remedy.
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
        let mut once_only = OnceOnlySnapshots::default();
        once_only.extend(Some(OnceOnlySnapshot::new(dir, GrowthLock::default())));
        once_only.marking = Some(tokio::spawn(async { answered.await.unwrap() }));
        let marked = timeout(MARKED_WITHIN * 2, once_only.mark_resumed())
            .await
            .unwrap();
        let text = marked.unwrap_err().to_string();
        let wanted = format!("the storage of {} has not answered", directory.path().display());
        assert!(text.contains(&wanted), "{text}");
        // The next resume marks again. The directory has no snapshot.json, so nothing needs a mark.
        answer.send(Err(VmError::internal("late"))).unwrap();
        once_only.mark_resumed().await.unwrap();
        assert!(once_only.snapshots.is_empty());
    }
}
