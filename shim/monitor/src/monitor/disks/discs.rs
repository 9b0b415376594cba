//! Discs of CD-ROM drives: inserted and ejected as volumes are plugged and unplugged.

use std::os::fd::OwnedFd;
use std::time::Duration;

use husk_proto::vmm::v1::{EjectDiscRequest, InsertDiscRequest};
use husk_vmi::{DiskPlan, ScsiAddress};
use husk_volumes::OpenDisk;
use tokio::time::{Instant, sleep};
use tracing::info;

use super::{AT_ONCE, DisksActor, RemovalResult, address};
use crate::monitor::vm_config;
use crate::monitor::vm_error::VmError;
use crate::monitor::vmm_connection::{VmmConnection, call_within};
use crate::snapshot::OpenDiskRefs;

/// Maximum time for a guest that has locked its tray to act on the eject request, as with libvirt.
const UNLOCKED_WITHIN: Duration = Duration::from_secs(5);
/// Interval of the attempts. Each is an eject request to the guest, which Linux polls every 2 s.
const EJECT_INTERVAL: Duration = Duration::from_millis(500);

impl DisksActor {
    /// Inserts the disc of a planned drive.
    pub(super) async fn insert(
        &mut self,
        drive: DiskPlan,
        handed: Option<OwnedFd>,
    ) -> Result<ScsiAddress, VmError> {
        let mut connection = self.connection()?;
        // The guest does not learn of a disc that grows.
        let (open, _) = self.open(&drive, handed).await?;
        let kept = OpenDiskRefs::of(&open);
        let bytes = match connection.insert(&drive, &open).await {
            Ok(bytes) => bytes,
            Err(error) => {
                if matches!(error, VmError::TimedOut(_)) {
                    self.undo_add(drive.name, |name| eject(connection, name));
                }
                return Err(error);
            }
        };
        info!(volume = drive.name, target = drive.target, "disc inserted");
        let address = address(&drive);
        self.keep(&drive.name, kept);
        self.table.insert(drive, bytes);
        address
    }
}

/// Ejects a disc. A guest that has locked the tray gets some time to unlock it.
pub(super) async fn eject(mut connection: VmmConnection, name: String) -> RemovalResult {
    let deadline = Instant::now() + UNLOCKED_WITHIN;
    let ejected = loop {
        match connection.eject(&name).await {
            Err(VmError::WrongState(_)) if Instant::now() < deadline => sleep(EJECT_INTERVAL).await,
            ejected => break ejected,
        }
    };
    // Nothing is written to a disc.
    (name, ejected.map(|()| String::new()))
}

impl VmmConnection {
    /// Inserts a disc. Returns the size that the guest can read, in bytes.
    async fn insert(&mut self, drive: &DiskPlan, open: &OpenDisk) -> Result<u64, VmError> {
        let (drive, descriptor) = vm_config::plugged(drive, open);
        self.send(descriptor).await?;
        let request = InsertDiscRequest { disc: drive.disk };
        let inserted = call_within(AT_ONCE, self.client.insert_disc(request)).await?;
        Ok(inserted.into_inner().bytes)
    }

    /// Ejects the disc of a drive. Returns when the VMM has closed it.
    async fn eject(&mut self, name: &str) -> Result<(), VmError> {
        let request = EjectDiscRequest { id: name.to_owned() };
        self.client.eject_disc(request).await?;
        Ok(())
    }
}
