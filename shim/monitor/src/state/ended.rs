//! Records of VMs of launcher pods that have ended, for an agent that did not run then.
//!
//! ```text
//! RUNTIME/.ended/POD-UID     the last `husk.shim.v1.Status`, encoded
//! ```
//!
//! The agent removes a record when the VMI is gone. Records that no agent removes go after a day.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use husk_proto::shim::v1::{Phase, Status};
use prost::Message;
use tracing::warn;

use super::error::StateError;
use super::{RuntimeDir, private_dirs};

/// Maximum age of a record.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);

impl RuntimeDir {
    /// Records the last status of the VM of a pod.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn record_end(&self, pod_uid: &str, status: &Status) -> Result<(), StateError> {
        // The name is checked as that of the pod's directory.
        self.vm_dir(super::PODS, pod_uid)?;
        let directory = self.ended_path();
        private_dirs(&directory)?;
        self.drop_old_records();
        // The agent reads no other fields of a VM that has ended.
        let last = Status {
            phase: status.phase,
            reason: status.reason.clone(),
            message: status.message.clone(),
            timeline: status.timeline,
            panics: status.panics,
            exit: status.exit,
            ..Status::default()
        };
        let (aside, path) = (directory.join(format!(".{pod_uid}")), directory.join(pod_uid));
        fs::write(&aside, last.encode_to_vec())
            .and_then(|()| fs::rename(&aside, &path))
            .map_err(StateError::io(&path))
    }

    /// Records the end of the VM of a pod whose shim died, unless its end is recorded.
    pub(super) fn record_death(&self, pod_uid: &str) -> Result<(), StateError> {
        if self.ended_path().join(pod_uid).exists() {
            return Ok(());
        }
        let status = Status {
            phase: Phase::Failed.into(),
            reason: "ShimDied".to_owned(),
            message: "the shim died, and the VM with it".to_owned(),
            ..Status::default()
        };
        self.record_end(pod_uid, &status)
    }

    /// Removes the record of a pod that has a shim after all.
    pub(super) fn forget_end(&self, pod_uid: &str) {
        let _ = fs::remove_file(self.ended_path().join(pod_uid));
    }

    pub(super) fn ended_path(&self) -> PathBuf {
        self.path.join(".ended")
    }

    fn drop_old_records(&self) {
        let entries = fs::read_dir(self.ended_path());
        for entry in entries.into_iter().flatten().flatten() {
            let modified = entry.metadata().and_then(|meta| meta.modified());
            let age = modified.ok().and_then(|modified| modified.elapsed().ok());
            if age.is_some_and(|age| age > KEPT)
                && let Err(error) = fs::remove_file(entry.path())
            {
                warn!(%error, "an old record was not removed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use husk_proto::vmm::v1::ExitReason;

    use super::*;
    use crate::state::PODS;

    #[test]
    fn last_status_is_recorded_without_its_devices() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::at(dir.path());
        let mut status = Status {
            phase: Phase::Succeeded.into(),
            reason: "Poweroff".to_owned(),
            panics: 1,
            exit: ExitReason::Poweroff.into(),
            disks: vec![husk_proto::shim::v1::Disk::default()],
            ..Status::default()
        };
        runtime.record_end("uid", &status).unwrap();
        status.disks.clear();
        let read = || Status::decode(&fs::read(dir.path().join(".ended/uid")).unwrap()[..]).unwrap();
        assert_eq!(read(), status);
        status.reason = "Killed".to_owned();
        runtime.record_end("uid", &status).unwrap();
        assert_eq!(read(), status);
        assert!(runtime.list().unwrap().is_empty());
        assert!(runtime.record_end("../uid", &status).is_err());
    }

    #[test]
    fn end_of_a_pod_whose_shim_died_is_recorded_before_its_directory_goes() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::at(dir.path());
        let record = |name: &str| fs::read(dir.path().join(".ended").join(name)).ok();
        let status = |name| Status::decode(&record(name).unwrap()[..]).unwrap();
        let ended = Status {
            phase: Phase::Succeeded.into(),
            ..Status::default()
        };
        drop(runtime.claim_launcher("dead").unwrap());
        drop(runtime.claim_launcher("ended").unwrap());
        runtime.record_end("ended", &ended).unwrap();
        // No agent waits for the end of a pod that brings its own VMI.
        drop(runtime.claim(PODS, "alone").unwrap());
        assert_eq!(runtime.remove_abandoned().unwrap().len(), 3);
        assert_eq!(status("dead").phase(), Phase::Failed);
        assert_eq!(status("dead").reason, "ShimDied");
        assert_eq!(status("ended"), ended);
        assert_eq!(record("alone"), None);

        let _alive = runtime.claim_launcher("dead").unwrap();
        assert_eq!(record("dead"), None);
    }

    #[test]
    fn records_of_yesterday_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::at(dir.path());
        for uid in ["old", "new"] {
            runtime.record_end(uid, &Status::default()).unwrap();
        }
        let old = dir.path().join(".ended/old");
        let long_ago = std::time::SystemTime::now() - KEPT - Duration::from_secs(60);
        fs::File::open(&old).unwrap().set_modified(long_ago).unwrap();
        runtime.record_end("next", &Status::default()).unwrap();
        assert!(!old.exists() && dir.path().join(".ended/new").exists());
    }
}
