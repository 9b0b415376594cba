//! SCSI passthrough devices.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use husk_disk::{CacheMode, Disk, DiskOptions};
use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::{self as pb, disk::Cache as PbCache};
use husk_virtio_scsi::{LunOptions, PassthroughUnit, open_lun};
use tonic::Status;

use super::fields::{OpenFuture, invalid, missing, take_fd};

/// Takes the device of the LUN in `field`, which is to be opened.
pub(super) async fn take_device(
    fds: &FdReceiver,
    field: &str,
    scsi: &pb::ScsiDisk,
) -> Result<OpenFuture<PassthroughUnit>, Status> {
    let disk = scsi
        .disk
        .as_ref()
        .ok_or_else(|| missing(&format!("{field}.disk")))?;
    let lun = scsi.passthrough.clone().unwrap_or_default();
    let device = take_fd(fds, &format!("{field}.disk.file"), disk.file.as_ref()).await?;
    let privileged = match lun.privileged.as_ref() {
        Some(_) => Some(
            take_fd(
                fds,
                &format!("{field}.passthrough.privileged"),
                lun.privileged.as_ref(),
            )
            .await?,
        ),
        None => None,
    };
    let options = LunOptions {
        read_only: disk.read_only,
        reservation: lun.reservation,
        privileged: privileged.map(husk_scsi_helper::PrivilegedScsiClient::new),
        max_segments: Some(lun.max_segments).filter(|segments| *segments > 0),
    };
    let cache = match disk.cache() {
        PbCache::None => CacheMode::None,
        PbCache::Writethrough => CacheMode::Writethrough,
        PbCache::Writeback | PbCache::Unspecified => CacheMode::Writeback,
    };
    let (field, id) = (field.to_owned(), disk.id.clone());
    Ok(Box::pin(async move {
        // On a blocking thread: opening sends commands to the device.
        let opened = tokio::task::spawn_blocking(move || unit(device, options, cache)).await;
        let opened = opened.map_err(|e| Status::internal(e.to_string()))?;
        opened.map_err(|e| invalid(&field, format!("disk {id:?}: {e}")))
    }))
}

fn unit(device: OwnedFd, options: LunOptions, cache: CacheMode) -> Result<PassthroughUnit, String> {
    let copy = device.try_clone().map_err(|e| e.to_string())?;
    let (device, limits) = open_lun(device, options).map_err(|e| e.to_string())?;
    let options = DiskOptions {
        read_only: true,
        cache,
        ..DiskOptions::default()
    };
    // Without a readable medium the device cannot boot the VM, but may be passed through.
    let image = Disk::open_raw(copy, options).ok();
    Ok(PassthroughUnit {
        device: Arc::new(device),
        limits,
        image,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use husk_proto::fds::{self, FdSender};

    use super::*;

    #[tokio::test]
    async fn a_file_that_is_no_scsi_device_is_refused() {
        let (sender, receiver) = fds::socketpair().unwrap();
        let (sender, fds) = (FdSender::new(sender).unwrap(), FdReceiver::new(receiver).unwrap());
        let file = tempfile::tempfile().unwrap();
        let scsi = pb::ScsiDisk {
            disk: Some(pb::Disk {
                id: "data".into(),
                file: Some(sender.send_one(file.as_fd()).await.unwrap().into()),
                ..Default::default()
            }),
            r#type: pb::scsi_disk::Type::Lun.into(),
            ..Default::default()
        };
        let opening = take_device(&fds, "disk", &scsi).await.unwrap();
        let error = opening.await.unwrap_err();
        assert_eq!(
            error.message(),
            "disk: disk \"data\": it is not a SCSI device; use `disk` instead of `lun`"
        );
    }
}
