//! SCSI passthrough of host devices.
//!
//! The VMM is unprivileged, so the kernel refuses some commands from it. Those that a guest may send are executed here,
//! by one thread per device, which ends when the VMM closes its end of the socket.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use husk_scsi_helper::{DataBuffer, HelperPolicy, PrivilegedScsiServer};
use husk_vmi::DiskPlan;
use rustix::fs::{FileType, fstat, major, minor};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tracing::warn;

use super::error::VolumeFault;
use super::image::{self, ImageAccess};
use super::image_format::ImageFormat;
use super::open_disk::{OpenDisk, OpenLun};
use super::path_handle::PathHandle;

/// PERSISTENT RESERVE IN, READ KEYS with 8 bytes: changes nothing, and the kernel requires privileges for it.
const READ_KEYS: [u8; 10] = [0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0];

const TIMEOUT: Duration = Duration::from_secs(15);

/// Opens a SCSI device.
pub(super) fn open(
    disk: &DiskPlan,
    found: &PathHandle,
    access: ImageAccess,
    reservation: bool,
) -> Result<OpenDisk, VolumeFault> {
    if found.kind != FileType::BlockDevice {
        return Err(VolumeFault::WrongFileType {
            path: found.path.clone(),
            kind: found.kind,
            wanted: "a block device, which a lun needs",
        });
    }
    let (file, cache) = image::open(found, access)?;
    let sysfs = sysfs(&file).map_err(VolumeFault::io(&found.path))?;
    if sysfs.join("partition").exists() {
        return Err(VolumeFault::Partition(found.path.clone()));
    }
    if !husk_scsi_helper::is_scsi(&file) {
        return Err(VolumeFault::NotScsi(found.path.clone()));
    }
    // SG_IO takes one of the paths, and the commands that come down the others meet a reservation of another nexus.
    if reservation && is_multipath(&sysfs) {
        return Err(VolumeFault::Multipath(found.path.clone()));
    }
    let privileged = if is_privileged(&file) {
        // The kernel does not check how the descriptor was opened, so the policy does.
        let policy = HelperPolicy {
            writable: !access.read_only,
            reservations: reservation,
        };
        Some(serve(&disk.name, &file, policy).map_err(VolumeFault::io(&found.path))?)
    } else if reservation {
        return Err(VolumeFault::NeedsRawIo(found.path.clone()));
    } else {
        None
    };
    let segments = fs::read_to_string(sysfs.join("queue/max_segments")).unwrap_or_default();
    Ok(OpenDisk {
        file: Some(file),
        base: None,
        new_overlay: false,
        private: false,
        path: found.path.clone(),
        read_only: access.read_only,
        cache,
        format: ImageFormat::Raw,
        block_sizes: None,
        lun: Some(OpenLun {
            privileged,
            max_segments: segments.trim().parse().unwrap_or(0),
        }),
    })
}

/// sysfs directory of a block device.
fn sysfs(file: &OwnedFd) -> rustix::io::Result<PathBuf> {
    let device = fstat(file)?.st_rdev;
    Ok(format!("/sys/dev/block/{}:{}", major(device), minor(device)).into())
}

/// True if a block device is a dm-multipath map, or may be one.
fn is_multipath(sysfs: &Path) -> bool {
    match fs::read(sysfs.join("dm/uuid")) {
        Ok(uuid) => uuid.starts_with(b"mpath-"),
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}

/// True if the kernel accepts privileged commands from this process. Errors of the device itself do not matter.
fn is_privileged(file: &OwnedFd) -> bool {
    let asked = husk_scsi_helper::execute(file, &READ_KEYS, DataBuffer::In(&mut [0; 8]), TIMEOUT);
    !asked.is_err_and(|error| error.raw_os_error() == Some(libc::EPERM))
}

/// Starts a thread that executes the commands that `policy` allows. Returns the client's socket.
fn serve(name: &str, file: &OwnedFd, policy: HelperPolicy) -> std::io::Result<OwnedFd> {
    let (here, there) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let server = PrivilegedScsiServer::new(file.try_clone()?, policy);
    let name = name.to_owned();
    let thread = thread::Builder::new().name("lun".into());
    thread.spawn(move || {
        if let Err(error) = server.serve(here) {
            warn!(disk = name, %error, "the privileged SCSI helper stopped: the guest loses persistent reservations and COMPARE AND WRITE");
        }
    })?;
    Ok(there)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multipath_maps_are_recognised() {
        let sysfs = tempfile::tempdir().unwrap();
        assert!(!is_multipath(sysfs.path()), "no device-mapper device");
        fs::create_dir(sysfs.path().join("dm")).unwrap();
        let uuid = sysfs.path().join("dm/uuid");
        for (content, multipath) in [
            ("mpath-3600508b400105e21\n", true),
            ("LVM-mpath-\n", false),
            ("\n", false),
        ] {
            fs::write(&uuid, content).unwrap();
            assert_eq!(is_multipath(sysfs.path()), multipath, "{content:?}");
        }
        fs::remove_file(&uuid).unwrap();
        fs::create_dir(&uuid).unwrap();
        assert!(is_multipath(sysfs.path()), "it cannot be read");
    }
}
