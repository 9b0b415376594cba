//! Discs of CD-ROM drives: opens, inserts and ejects them.

use husk_disk::Disk;
use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1 as pb;
use husk_virtio_scsi::ScsiHandle;
use tonic::Status;

use super::disks;
use super::fields::OpenFuture;

/// Takes the file of the disc in `field`, whose image is to be opened read-only.
pub(super) async fn take_image(
    fds: &FdReceiver,
    field: &str,
    disc: &pb::Disk,
) -> Result<OpenFuture<Disk>, Status> {
    let disc = pb::Disk {
        read_only: true,
        ..disc.clone()
    };
    disks::take_image(fds, field, &disc).await
}

/// Inserts a disc into the drive that it names. Returns the size that the guest can read, in bytes.
pub(super) async fn insert(fds: &FdReceiver, scsi: ScsiHandle, disc: pb::Disk) -> Result<u64, Status> {
    let image = take_image(fds, "disc", &disc).await?.await?;
    scsi.insert(&disc.id, image).await.map_err(|e| disks::status(&e))
}

/// Ejects the disc of a drive, if it has one, and closes it.
pub(super) async fn eject(scsi: ScsiHandle, id: String) -> Result<(), Status> {
    let disc = scsi.eject(&id, false).await.map_err(|e| disks::status(&e))?;
    disks::close(disc).await
}
