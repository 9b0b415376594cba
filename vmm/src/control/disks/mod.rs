//! Disks: converts a request's fields, and adds, removes, resizes and lists disks of a running machine.

use std::io;
use std::sync::Arc;

use husk_disk::{BlockSize, CacheMode, Disk, DiskCounters, DiskOptions, ErrorPolicy, ImageFormat};
use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::block_size::Size;
use husk_proto::vmm::v1::disk as pb_disk;
use husk_proto::vmm::v1::scsi_disk::Type;
use husk_proto::vmm::v1::{self as pb};
use husk_virtio_blk::BlkHandle;
use husk_virtio_scsi::target::{DeviceKind, Lun};
use husk_virtio_scsi::{Medium, NewUnit, ScsiError, ScsiHandle, UnitAddress, UnitInfo};
use tonic::Status;

use super::fields::{OpenFuture, invalid, missing, take_fd};
use super::{discs, passthrough};

/// Handles of a machine's disks. They outlive it, and fail then.
#[derive(Debug)]
pub struct MachineDisks {
    /// The virtio-blk disks.
    pub blk: Vec<BlkHandle>,
    /// The SCSI controller.
    pub scsi: ScsiHandle,
}

fn options(disk: &pb::Disk) -> DiskOptions {
    let size = disk.block_size.as_ref().and_then(|size| size.size.as_ref());
    DiskOptions {
        read_only: disk.read_only,
        cache: match disk.cache() {
            pb_disk::Cache::None => CacheMode::None,
            pb_disk::Cache::Writethrough => CacheMode::Writethrough,
            pb_disk::Cache::Writeback | pb_disk::Cache::Unspecified => CacheMode::Writeback,
        },
        error_policy: match disk.error_policy() {
            pb_disk::ErrorPolicy::Stop | pb_disk::ErrorPolicy::Unspecified => ErrorPolicy::Stop,
            pb_disk::ErrorPolicy::Report => ErrorPolicy::Report,
            pb_disk::ErrorPolicy::Ignore => ErrorPolicy::Ignore,
            pb_disk::ErrorPolicy::Enospace => ErrorPolicy::NoSpace,
        },
        block_size: match size {
            Some(Size::MatchVolume(true)) => BlockSize::MatchVolume,
            Some(Size::MatchVolume(false)) | None => BlockSize::Auto,
            Some(Size::Custom(size)) => BlockSize::Custom {
                logical: size.logical,
                physical: size.physical,
            },
        },
        preallocated: disk.preallocated,
    }
}

fn format(format: pb_disk::Format) -> ImageFormat {
    match format {
        pb_disk::Format::Raw | pb_disk::Format::Unspecified => ImageFormat::Raw,
        pb_disk::Format::Qcow2 => ImageFormat::Qcow2,
    }
}

/// Takes the files of the disk in `field`, whose image is to be opened.
pub(super) async fn take_image(
    fds: &FdReceiver,
    field: &str,
    disk: &pb::Disk,
) -> Result<OpenFuture<Disk>, Status> {
    let file = take_fd(fds, &format!("{field}.file"), disk.file.as_ref()).await?;
    let base = match disk.base.as_ref() {
        Some(base) => Some(take_fd(fds, &format!("{field}.base"), Some(base)).await?),
        None => None,
    };
    let base = base.map(|base| (base, format(disk.base_format())));
    let options = options(disk);
    if disk.new_overlay && disk.read_only {
        return Err(invalid(
            &format!("{field}.new_overlay"),
            "a read-only disk cannot be a new overlay",
        ));
    }
    let open: Box<dyn FnOnce() -> io::Result<Disk> + Send> =
        match (format(disk.format()), base, disk.new_overlay) {
            (ImageFormat::Raw, None, false) => Box::new(move || Disk::open_raw(file, options)),
            (ImageFormat::Qcow2, base, false) => Box::new(move || Disk::open_qcow2(file, base, options)),
            (ImageFormat::Qcow2, Some(base), true) => {
                Box::new(move || Disk::new_overlay(file, base, options))
            }
            (ImageFormat::Raw, ..) => {
                return Err(invalid(
                    &format!("{field}.format"),
                    "a raw disk cannot be an overlay",
                ));
            }
            (ImageFormat::Qcow2, None, true) => return Err(missing(&format!("{field}.base"))),
        };
    let (field, id) = (field.to_owned(), disk.id.clone());
    Ok(Box::pin(async move {
        // On a blocking thread: the file system may be slow.
        let opened = tokio::task::spawn_blocking(open).await;
        let opened = opened.map_err(|e| Status::internal(e.to_string()))?;
        opened.map_err(|e| refused(&field, &id, &e))
    }))
}

/// The status for a disk whose files are refused. The monitor knows their names, and finds the disk's id in the
/// details.
pub(super) fn refused(field: &str, id: &str, error: &io::Error) -> Status {
    let fault = pb::DiskFault {
        disk: id.to_owned(),
        reason: error.to_string(),
    };
    fault.to_status(format!("{field}: disk {id:?}: {error}"))
}

/// Takes the files of the SCSI disk in `field`, whose unit is to be opened.
pub(super) async fn take_unit(
    fds: &FdReceiver,
    field: &str,
    scsi: &pb::ScsiDisk,
) -> Result<OpenFuture<NewUnit>, Status> {
    let inner = format!("{field}.disk");
    let disk = scsi.disk.as_ref().ok_or_else(|| missing(&inner))?;
    if scsi.controller != 0 {
        let reason = format!("there is no controller {}", scsi.controller);
        return Err(invalid(&format!("{field}.controller"), reason));
    }
    let out_of_range = |name: &str| invalid(&format!("{field}.{name}"), "out of range");
    let target = u8::try_from(scsi.target).map_err(|_| out_of_range("target"))?;
    let lun = scsi.lun.ok_or_else(|| missing(&format!("{field}.lun")))?;
    let lun = u16::try_from(lun).ok().and_then(Lun::new);
    let lun = lun.ok_or_else(|| out_of_range("lun"))?;
    let medium: OpenFuture<Medium> = match scsi.r#type() {
        Type::Cdrom if disk.file.is_none() => Box::pin(async { Ok(Medium::CdRom(None)) }),
        Type::Cdrom => {
            let disc = discs::take_image(fds, &inner, disk).await?;
            Box::pin(async { Ok(Medium::CdRom(Some(disc.await?))) })
        }
        Type::Lun => {
            let device = passthrough::take_device(fds, field, scsi).await?;
            Box::pin(async { Ok(Medium::Passthrough(device.await?)) })
        }
        Type::Disk | Type::Unspecified => {
            let image = take_image(fds, &inner, disk).await?;
            Box::pin(async { Ok(Medium::Disk(image.await?)) })
        }
    };
    let (id, serial, shareable) = (disk.id.clone(), disk.serial.clone(), scsi.shareable);
    Ok(Box::pin(async move {
        Ok(NewUnit {
            id,
            address: UnitAddress { target, lun },
            serial,
            medium: medium.await?,
            shareable,
        })
    }))
}

/// The status for an error of the controller.
pub(super) fn status(error: &ScsiError) -> Status {
    let text = error.to_string();
    match error {
        ScsiError::Target(..) | ScsiError::Medium(..) | ScsiError::NotADrive(_) => {
            Status::invalid_argument(text)
        }
        ScsiError::Occupied(..) | ScsiError::Elsewhere(..) | ScsiError::Loaded(_) => {
            Status::already_exists(text)
        }
        ScsiError::NotFound(_) => Status::not_found(text),
        ScsiError::NotReleased(_) | ScsiError::Removing(_) | ScsiError::Prevented(_) => {
            Status::failed_precondition(text)
        }
        ScsiError::Io(_, error) => of_io(error, text),
        ScsiError::Full(_) => Status::resource_exhausted(text),
        ScsiError::Gone => Status::unavailable(text),
    }
}

fn of_io(error: &io::Error, text: String) -> Status {
    match error.kind() {
        io::ErrorKind::QuotaExceeded => Status::resource_exhausted(text),
        io::ErrorKind::Unsupported => Status::failed_precondition(text),
        _ => Status::internal(text),
    }
}

/// Adds a SCSI disk to a running machine, at the LUN it names or at the lowest free one. Returns its address.
pub(super) async fn add(
    fds: &FdReceiver,
    disks: MachineDisks,
    disk: Option<pb::ScsiDisk>,
) -> Result<pb::AddDiskResponse, Status> {
    let mut disk = disk.ok_or_else(|| missing("disk"))?;
    let MachineDisks { blk, scsi } = disks;
    let id = disk.disk.as_ref().map_or("", |disk| &disk.id);
    if blk.iter().any(|disk| disk.id() == id) {
        return Err(Status::already_exists(format!(
            "disk {id:?} is a virtio-blk disk"
        )));
    }
    let named = disk.lun.is_some();
    disk.lun.get_or_insert(0);
    let unit = take_unit(fds, "disk", &disk).await?.await?;
    let added = if named {
        let address = unit.address;
        scsi.add(unit).await.map(|()| address)
    } else {
        scsi.add_at_free_lun(unit).await
    };
    let address = Some(scsi_address(added.map_err(|e| status(&e))?));
    Ok(pb::AddDiskResponse { address })
}

fn scsi_address(address: UnitAddress) -> pb::ScsiAddress {
    pb::ScsiAddress {
        controller: 0,
        target: address.target.into(),
        lun: address.lun.number().into(),
    }
}

/// Removes a SCSI disk and closes it.
pub(super) async fn remove(scsi: ScsiHandle, id: String) -> Result<pb::RemoveDiskResponse, Status> {
    let removed = scsi.remove(&id).await.map_err(|e| status(&e))?;
    close(removed.disk).await?;
    let flush_error = removed.flushed.err().map_or(String::new(), |e| e.to_string());
    Ok(pb::RemoveDiskResponse { flush_error })
}

/// Closes an image that the controller has given back.
pub(super) async fn close(disk: Option<Disk>) -> Result<(), Status> {
    // On a blocking thread: some file systems write when a file is closed.
    let closed = tokio::task::spawn_blocking(move || {
        drop(disk);
        crate::memory_trim::trim_heap();
    });
    closed.await.map_err(|e| Status::internal(e.to_string()))
}

/// Updates the size of a virtio-blk or SCSI disk from its file. Returns the size in bytes.
pub(super) async fn resize(disks: MachineDisks, id: String) -> Result<u64, Status> {
    let MachineDisks { blk, scsi } = disks;
    let blk = blk.into_iter().find(|disk| disk.id() == id);
    let resized = tokio::task::spawn_blocking(move || match blk {
        Some(blk) => {
            let resized = blk.resize();
            resized.map_err(|e| of_io(&e, format!("disk {id:?}: {e}")))
        }
        None => scsi.resize(&id).map_err(|e| status(&e)),
    });
    resized.await.map_err(|e| Status::internal(e.to_string()))?
}

/// All disks for Info.
pub(super) async fn list(blk: Vec<pb::DiskInfo>, scsi: ScsiHandle) -> Vec<pb::DiskInfo> {
    let scsi = scsi.list().await.unwrap_or_default();
    blk.into_iter().chain(scsi.iter().map(scsi_info)).collect()
}

fn scsi_info(info: &UnitInfo) -> pb::DiskInfo {
    let kind = match info.kind {
        DeviceKind::Disk => Type::Disk,
        DeviceKind::CdRom => Type::Cdrom,
        DeviceKind::Passthrough => Type::Lun,
    };
    pb::DiskInfo {
        id: info.id.clone(),
        scsi: Some(scsi_address(info.address)),
        bytes: info.bytes.unwrap_or(0),
        read_only: info.read_only,
        r#type: kind.into(),
        removing: info.removing,
        counters: info.counters.map(counters),
    }
}

fn counters(counters: DiskCounters) -> pb::DiskCounters {
    pb::DiskCounters {
        reads: counters.reads,
        read_bytes: counters.read_bytes,
        writes: counters.writes,
        written_bytes: counters.written_bytes,
        flushes: counters.flushes,
    }
}

/// Writes to the images' files what this process holds of them. The VM counts as being saved (`saving`) until that is
/// done.
pub(super) async fn write_back(disks: MachineDisks, saving: Arc<()>) -> Result<(), Status> {
    let MachineDisks { blk, scsi } = disks;
    let units = scsi.list().await.map_err(|e| status(&e))?;
    let written = tokio::task::spawn_blocking(move || {
        let _saving = saving;
        for disk in blk {
            let written = disk.write_back();
            written.map_err(|e| of_io(&e, format!("disk {:?}: {e}", disk.id())))?;
        }
        let images = units.iter().filter(|unit| unit.counters.is_some());
        for unit in images {
            scsi.write_back(&unit.id).map_err(|e| status(&e))?;
        }
        Ok(())
    });
    written.await.map_err(|e| Status::internal(e.to_string()))?
}

/// A virtio-blk disk for Info.
pub(super) fn blk_info(blk: &BlkHandle) -> pb::DiskInfo {
    let geometry = blk.geometry();
    pb::DiskInfo {
        id: blk.id().to_owned(),
        scsi: None,
        bytes: geometry.size,
        read_only: geometry.read_only,
        r#type: Type::Disk.into(),
        removing: false,
        counters: Some(counters(blk.counters())),
    }
}

#[cfg(test)]
mod tests;
