//! Unsupported values of disks and volumes.

use crate::field::{FieldError, Warning};
use crate::load::Vmi;
use crate::plan::disks::effective_disks;
use crate::schema::Diagnostics;
use crate::types::{Disk, Feature};

/// Maximum logical block size of a guest: its page size.
const LOGICAL: i64 = 4096;

pub(super) fn support(vmi: &Vmi, found: &mut Diagnostics) {
    let listed = vmi.spec.domain.devices.disks.len();
    for (i, disk) in effective_disks(vmi).iter().enumerate() {
        let path = vmi.at(&format!("domain.devices.disks[{i}]"));
        let position = vmi.spec.volumes.iter().position(|v| v.name == disk.name);
        let volume = position.map(|position| vmi.at(&format!("volumes[{position}]")));
        if i < listed {
            bus(disk, &path, found);
        } else if let Some(volume) = &volume
            && !disk.is_virtio_blk()
        {
            let text = "no disk uses this volume, so a disk is added on KubeVirt's default bus, sata, which is provided as scsi";
            found.warnings.push(Warning::new(volume, text));
        }
        settings(disk, &path, found);
        match disk.target().0 {
            "cdrom" => cdrom(disk, &path, found),
            "lun" => lun(disk, &path, found),
            _ => {}
        }
        let written =
            disk.target().0 == "disk" && disk.target().1.is_none_or(|target| target.readonly != Some(true));
        if let (Some(position), Some(volume)) = (position, volume)
            && vmi.spec.volumes[position].container_disk.is_some()
            && written
        {
            let text = "writes go to an overlay that is removed with the VM";
            found
                .warnings
                .push(Warning::new(format!("{volume}.containerDisk"), text));
        }
    }
    for (i, volume) in vmi.spec.volumes.iter().enumerate() {
        if let Some(ephemeral) = &volume.ephemeral
            && ephemeral.persistent_volume_claim.is_none()
        {
            let path = vmi.at(&format!("volumes[{i}].ephemeral.persistentVolumeClaim"));
            let text = format!("{path} is required");
            found.unsupported.push(FieldError::required(path, text));
        }
    }
}

/// Warnings about replaced buses. SATA is provided as SCSI, since the guest's device names stay the same: `sda`, `sdb`,
/// … and `sr0`.
fn bus(disk: &Disk, path: &str, found: &mut Diagnostics) {
    let (kind, target) = disk.target();
    let given = target
        .and_then(|target| target.bus.as_deref())
        .unwrap_or_default();
    let field = format!("{path}.{kind}.bus");
    let names = if kind == "cdrom" {
        "sr0, sr1 …"
    } else {
        "sda, sdb …"
    };
    match (given, kind) {
        ("usb", _) => {
            let text = "bus usb is not supported; use virtio or scsi";
            found.unsupported.push(FieldError::unsupported(field, text));
        }
        ("", _) => {
            let text = format!(
                "has no bus; KubeVirt's default, sata, is provided as scsi: the guest still sees {names}, but uses the \
                 driver virtio_scsi"
            );
            found.warnings.push(Warning::new(path, text));
        }
        ("sata", _) => {
            let text = format!(
                "sata is provided as scsi: the guest still sees {names}, but uses the driver virtio_scsi"
            );
            found.warnings.push(Warning::new(field, text));
        }
        ("virtio", "lun") => {
            let text = "virtio is provided as scsi, since virtio-blk has no SCSI commands";
            found.warnings.push(Warning::new(field, text));
        }
        // All other buses are supported, or refused by KubeVirt's rules.
        _ => {}
    }
}

fn cdrom(disk: &Disk, path: &str, found: &mut Diagnostics) {
    let Some(cdrom) = &disk.cdrom else { return };
    let tray = cdrom.tray.as_deref().unwrap_or_default();
    if !matches!(tray, "" | "open" | "closed") {
        let field = format!("{path}.cdrom.tray");
        let text = format!("{field} '{tray}' is neither open nor closed");
        found.unsupported.push(FieldError::invalid(field, text));
    }
    if tray == "open" {
        let text = "is ignored: the tray is closed at the start; the guest can open it";
        found
            .warnings
            .push(Warning::new(format!("{path}.cdrom.tray"), text));
    }
    if cdrom.readonly == Some(false) {
        let text = "is ignored: a CD-ROM is always read-only";
        found
            .warnings
            .push(Warning::new(format!("{path}.cdrom.readonly"), text));
    }
    if has_block_size(disk) {
        let text = "is ignored: a CD-ROM has blocks of 2048 bytes";
        found
            .warnings
            .push(Warning::new(format!("{path}.blockSize"), text));
    }
}

fn lun(disk: &Disk, path: &str, found: &mut Diagnostics) {
    if has_block_size(disk) {
        let text = "is ignored: a LUN has the block sizes of the host device";
        found
            .warnings
            .push(Warning::new(format!("{path}.blockSize"), text));
    }
    if disk.cache.as_deref().is_some_and(|cache| !cache.is_empty()) {
        let text = "is ignored: commands of a LUN go to the host device without a cache";
        found.warnings.push(Warning::new(format!("{path}.cache"), text));
    }
    if disk.serial.as_deref().is_some_and(|serial| !serial.is_empty()) {
        let text = "is ignored: a LUN has the serial number of the host device";
        found.warnings.push(Warning::new(format!("{path}.serial"), text));
    }
    if disk
        .error_policy
        .as_deref()
        .is_some_and(|policy| policy != "report")
    {
        let text = "is ignored: errors of a LUN are always reported to the guest";
        found
            .warnings
            .push(Warning::new(format!("{path}.errorPolicy"), text));
    }
}

fn has_block_size(disk: &Disk) -> bool {
    disk.block_size
        .as_ref()
        .is_some_and(|size| size.custom.is_some() || size.match_volume.as_ref().is_some_and(Feature::is_on))
}

/// Reports unsupported settings of a disk.
fn settings(disk: &Disk, path: &str, found: &mut Diagnostics) {
    let custom = disk.block_size.as_ref().and_then(|size| size.custom.as_ref());
    if let Some(logical) = custom.map(|custom| custom.logical).filter(|size| *size > LOGICAL)
        && disk.target().0 == "disk"
    {
        let field = format!("{path}.blockSize.custom.logical");
        let text = format!(
            "{field} '{logical}' is not supported: the maximum logical block size is {LOGICAL} bytes"
        );
        found.unsupported.push(FieldError::unsupported(field, text));
    }
    if custom.is_some_and(|custom| custom.discard_granularity.is_some_and(|bytes| bytes != 0)) {
        let text = "is ignored: the discard granularity is that of the volume";
        let field = format!("{path}.blockSize.custom.discardGranularity");
        found.warnings.push(Warning::new(field, text));
    }
    if let Some(io) = disk.io.as_deref().filter(|io| !io.is_empty()) {
        let text = format!("'{io}' is ignored: Husk uses io_uring, or threads if io_uring is disabled");
        found.warnings.push(Warning::new(format!("{path}.io"), text));
    }
    if disk.dedicated_io_thread && !disk.is_virtio_blk() {
        let text = "is ignored: the disks of the SCSI controller share its worker threads";
        found
            .warnings
            .push(Warning::new(format!("{path}.dedicatedIOThread"), text));
    }
}
