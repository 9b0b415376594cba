//! Open files of volumes, which clients send to `fds.sock`.

use std::os::fd::OwnedFd;

use husk_proto::fds::{FdReceiver, Token};
use husk_proto::vmm::v1::Fd;
use husk_vmi::FileId;
use husk_volumes::identify;
use tokio::task::spawn_blocking;

use super::error_chain::error_chain;
use super::vm_error::VmError;

/// The files that clients have sent.
#[derive(Debug, Clone)]
pub(super) struct VolumeFiles {
    descriptors: FdReceiver,
}

impl VolumeFiles {
    pub(super) fn new(descriptors: FdReceiver) -> VolumeFiles {
        VolumeFiles { descriptors }
    }

    /// Takes the descriptor that was sent for a volume and identifies its file.
    pub(super) async fn take(&self, fd: &Fd, read_only: bool) -> Result<(OwnedFd, FileId), VmError> {
        let token = Token::try_from(fd).map_err(|error| VmError::invalid_argument(error.to_string()))?;
        let taken = self.descriptors.take(token).await;
        let fd = taken.map_err(|error| VmError::wrong_state(error.to_string()))?;
        // The file may be on a network file system.
        let identified = spawn_blocking(move || identify(&fd, read_only).map(|id| (fd, id))).await;
        let identified = identified.map_err(|error| VmError::internal(error.to_string()))?;
        identified.map_err(|fault| VmError::invalid_argument(error_chain(&fault)))
    }
}
