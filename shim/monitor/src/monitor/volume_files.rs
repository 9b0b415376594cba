//! Open files of volumes, which clients send to `fds.sock`.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use husk_proto::fds::{FdReceiver, Token};
use husk_proto::vmm::v1::Fd;
use husk_vmi::FileId;
use husk_volumes::identify;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::disks::storage_hangs;
use super::error_chain::error_chain;
use super::vm_error::VmError;

/// See [`VolumeFiles::limit`].
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// Maximum number of these calls. Each that hangs holds a thread.
const CALLS: usize = 16;

/// The files that clients have sent.
#[derive(Debug, Clone)]
pub(super) struct VolumeFiles {
    descriptors: FdReceiver,
    calls: Arc<Semaphore>,
    under_way: VolumesUnderWay,
    /// Maximum time of a call of a file system.
    limit: Duration,
}

impl VolumeFiles {
    pub(super) fn new(descriptors: FdReceiver) -> VolumeFiles {
        VolumeFiles {
            descriptors,
            calls: Arc::new(Semaphore::new(CALLS)),
            under_way: VolumesUnderWay::default(),
            limit: ANSWERED_WITHIN,
        }
    }

    /// Takes the descriptor that was sent for the volume `name` and identifies its file.
    pub(super) async fn take(
        &self,
        name: &str,
        fd: &Fd,
        read_only: bool,
    ) -> Result<(OwnedFd, FileId), VmError> {
        let token = Token::try_from(fd).map_err(|error| VmError::invalid_argument(error.to_string()))?;
        let taken = self.descriptors.take(token).await;
        let fd = taken.map_err(|error| VmError::wrong_state(error.to_string()))?;
        let identified = self.call(name, move || identify(&fd, read_only).map(|id| (fd, id)));
        identified
            .await?
            .map_err(|fault| VmError::invalid_argument(error_chain(&fault)))
    }

    /// Calls the file system of the volume `name`, which may be one of a network, in a thread of its own. A volume has
    /// one call at a time: one that hangs holds one thread.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        name: &str,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, VmError> {
        let Some(place) = self.under_way.enter(name) else {
            return Err(storage_hangs(name));
        };
        let many = || VmError::limit_reached("the storage of too many volumes does not answer");
        let permit = timeout(self.limit, Arc::clone(&self.calls).acquire_owned()).await;
        let permit = permit.map_err(|_| many())?.map_err(|_| many())?;
        let answer = spawn_blocking(move || {
            let _held = (place, permit);
            call()
        });
        match timeout(self.limit, answer).await {
            Ok(answer) => answer.map_err(|error| VmError::internal(error.to_string())),
            Err(_) => Err(storage_hangs(name)),
        }
    }
}

/// The volumes whose file systems are being called.
#[derive(Debug, Clone, Default)]
struct VolumesUnderWay(Arc<Mutex<HashSet<String>>>);

impl VolumesUnderWay {
    fn names(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a volume until the place is dropped; `None` if it is there.
    fn enter(&self, name: &str) -> Option<VolumePlace> {
        let is_new = self.names().insert(name.to_owned());
        is_new.then(|| VolumePlace(self.clone(), name.to_owned()))
    }
}

/// The place of a volume among [`VolumesUnderWay`].
struct VolumePlace(VolumesUnderWay, String);

impl Drop for VolumePlace {
    fn drop(&mut self) {
        let VolumePlace(volumes, name) = self;
        volumes.names().remove(name);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn storage_that_hangs_costs_its_volume_only() {
        let dir = tempfile::tempdir().unwrap();
        let socket = std::os::unix::net::UnixListener::bind(dir.path().join("fds.sock")).unwrap();
        let mut files = VolumeFiles::new(FdReceiver::listen(socket.into(), 1, |_| true).unwrap());
        files.limit = Duration::from_millis(20);
        let (release, hold) = mpsc::channel::<()>();
        let hangs = move || hold.recv().is_ok();
        assert_eq!(files.call("data", hangs).await, Err(storage_hangs("data")));
        assert_eq!(files.calls.available_permits(), CALLS - 1);
        files.limit = ANSWERED_WITHIN;
        assert_eq!(files.call("data", || true).await, Err(storage_hangs("data")));
        assert_eq!(files.call("other", || 7).await, Ok(7));
        drop(release);
        while files.calls.available_permits() < CALLS {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(files.call("data", || 8).await, Ok(8));
    }
}
