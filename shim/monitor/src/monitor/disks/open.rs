//! Opens the files of volumes that are plugged.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use husk_vmi::DiskPlan;
use husk_volumes::{OpenDisk, VolumeError, VolumeFault};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::DisksActor;
use crate::monitor::error_chain::error_chain;
use crate::monitor::resize_watch::SizeProbe;
use crate::monitor::vm_error::VmError;

/// Maximum time to open the file of a volume. The actor does nothing else meanwhile.
const OPENED_WITHIN: Duration = Duration::from_secs(5);

impl DisksActor {
    /// Opens the file of a volume, and a probe of its size.
    pub(super) async fn open(
        &mut self,
        disk: &DiskPlan,
        handed: Option<OwnedFd>,
    ) -> Result<(OpenDisk, io::Result<Option<SizeProbe>>), VmError> {
        let (planned, environment) = (disk.clone(), self.environment.clone());
        let opened = self.open_within(OPENED_WITHIN, &disk.name, move || {
            let open = husk_volumes::open_hotplugged(&planned, &environment.paths, handed.as_ref())?;
            let probe = open.file.as_ref().map(SizeProbe::of).transpose();
            Ok::<_, VolumeError>((open, probe))
        });
        opened.await?.map_err(|error| volume_refused(&error))
    }

    /// Runs `open` in a blocking thread. If it takes longer, what it opens is closed, and until then the volume is
    /// refused.
    async fn open_within<T: Send + 'static>(
        &mut self,
        limit: Duration,
        name: &str,
        open: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, VmError> {
        self.opening.retain(|_, opening| !opening.is_finished());
        if self.opening.contains_key(name) {
            return Err(storage_hangs(name));
        }
        let mut opening = spawn_blocking(open);
        match timeout(limit, &mut opening).await {
            Ok(opened) => opened.map_err(|error| VmError::internal(error.to_string())),
            Err(_) => {
                self.opening.insert(name.to_owned(), opening.abort_handle());
                Err(storage_hangs(name))
            }
        }
    }
}

/// The error of a volume on storage that does not answer.
pub(in crate::monitor) fn storage_hangs(name: &str) -> VmError {
    VmError::timed_out(format!("the storage of volume {name:?} does not answer"))
}

/// Converts an error of opening a volume. A path outside of the pod's mounts is not permitted; other errors may be
/// temporary.
fn volume_refused(error: &VolumeError) -> VmError {
    let text = error_chain(error);
    match error.fault {
        VolumeFault::NotInPod(_) => VmError::NotPermitted(text),
        _ => VmError::WrongState(text),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::super::config_lock::tests::actor;
    use super::*;

    #[tokio::test]
    async fn a_volume_whose_storage_does_not_answer_is_refused_until_it_does() {
        const SHORT: Duration = Duration::from_millis(50);
        const LONG: Duration = Duration::from_secs(20);
        let folder = tempfile::tempdir().unwrap();
        let (mut actor, _handle) = actor(folder.path());
        let (answer, answered) = mpsc::channel::<()>();
        let hangs = move || {
            let _ = answered.recv();
        };
        let refused = actor.open_within(SHORT, "data", hangs).await.unwrap_err();
        assert_eq!(refused, storage_hangs("data"));
        assert_eq!(actor.open_within(LONG, "other", || 7).await.unwrap(), 7);
        assert_eq!(
            actor.open_within(LONG, "data", || 7).await.unwrap_err(),
            storage_hangs("data")
        );
        answer.send(()).unwrap();
        while actor.open_within(LONG, "data", || 7).await.is_err() {
            tokio::time::sleep(SHORT).await;
        }
    }
}
