//! Kernels that disk images carry, by husk-image over the disk backend.

use husk_disk::DiskReader;

use super::{BootError, Payload};

pub(super) fn find(disks: &[(String, DiskReader)]) -> Result<Payload<'_>, BootError> {
    Err(BootError::NoBootableDisk(format!("{} disks", disks.len())))
}
