//! The disks of the plan.

use std::collections::HashSet;

use uuid::Uuid;

use super::credentials::is_credential_volume;
use super::disk::{
    BlockSize, CacheMode, Controller, DeviceType, DiskPlan, DiskSource, ErrorPolicy, FormatPolicy,
    ScsiAddress, target_name,
};
use super::types::PodResources;
use super::volume_source::{KERNEL_VOLUME, VolumeContext};
use crate::field::FieldError;
use crate::load::Vmi;
use crate::types::{self, Disk, Feature, Volume};

/// All disks of a VMI: those listed, then one for each volume without a disk. One of downward metrics is on bus virtio
/// unless it names another.
pub(crate) fn effective_disks(vmi: &Vmi) -> Vec<Disk> {
    let devices = &vmi.spec.domain.devices;
    let mut disks = devices.disks.clone();
    let mut used: HashSet<&str> = devices
        .disks
        .iter()
        .map(|d| d.name.as_str())
        .chain(devices.filesystems.iter().map(|f| f.name.as_str()))
        .collect();
    for volume in &vmi.spec.volumes {
        if used.insert(&volume.name) {
            disks.push(Disk {
                name: volume.name.clone(),
                ..Disk::default()
            });
        }
    }
    let metrics = vmi.spec.volumes.iter().filter(|v| v.downward_metrics.is_some());
    for volume in metrics {
        let of_volume = |disk: &&mut Disk| disk.name == volume.name && disk.target().0 == "disk";
        if let Some(disk) = disks.iter_mut().find(of_volume) {
            let target = disk.disk.get_or_insert_default();
            if target.bus.as_deref().unwrap_or_default().is_empty() {
                target.bus = Some("virtio".to_owned());
            }
        }
    }
    disks
}

/// Plans every disk, with `queues` request queues each.
pub(super) fn plan(
    vmi: &Vmi,
    uuid: Uuid,
    queues: u32,
    resources: &PodResources,
    errors: &mut Vec<FieldError>,
) -> Vec<DiskPlan> {
    for name in resources.volumes.keys() {
        if name != KERNEL_VOLUME && vmi.spec.volume(name).is_none() && !is_credential_volume(vmi, name) {
            let text = format!("--volume names '{name}', but there is no such volume");
            errors.push(FieldError::not_found(vmi.at("volumes"), text));
        }
    }
    let mut disks: Vec<DiskPlan> = Vec::new();
    for (index, disk) in effective_disks(vmi).iter().enumerate() {
        let position = vmi
            .spec
            .volumes
            .iter()
            .position(|volume| volume.name == disk.name);
        let volume = position.map(|position| &vmi.spec.volumes[position]);
        let source = match (position, volume) {
            (Some(position), Some(volume)) => {
                let context = VolumeContext {
                    vmi,
                    uuid,
                    resources,
                    path: vmi.at(&format!("volumes[{position}]")),
                };
                context.source(volume)
            }
            _ => Ok(DiskSource::Empty),
        };
        let cache = cache(disk, &vmi.at(&format!("domain.devices.disks[{index}]")));
        let used = |scsi| disks.iter().filter(move |disk| disk.is_scsi() == scsi);
        let slot = match disk.is_virtio_blk() {
            true => Some((Controller::VirtioBlk, target_name("vd", used(false).count()))),
            false => ScsiAddress::free(used(true).filter_map(DiskPlan::scsi_address))
                .map(|address| (Controller::VirtioScsi(address), address.name())),
        };
        match (source, cache) {
            (Ok(source), Ok(cache)) => {
                if let Some((controller, target)) = slot {
                    disks.push(DiskPlan {
                        preallocated: vmi.preallocated.contains(&disk.name),
                        ..one(disk, volume, source, controller, target, cache, queues)
                    });
                }
            }
            (source, cache) => errors.extend(source.err().into_iter().chain(cache.err())),
        }
    }
    disks
}

fn one(
    disk: &Disk,
    volume: Option<&Volume>,
    source: DiskSource,
    controller: Controller,
    target: String,
    cache: CacheMode,
    queues: u32,
) -> DiskPlan {
    let (kind, given) = disk.target();
    let device = match kind {
        "cdrom" => DeviceType::Cdrom {
            tray_open: given.and_then(|cdrom| cdrom.tray.as_deref()) == Some("open"),
        },
        "lun" => DeviceType::Lun {
            reservation: given.is_some_and(|lun| lun.reservation),
        },
        _ => DeviceType::Disk,
    };
    let claim_read_only = volume
        .and_then(|volume| volume.persistent_volume_claim.as_ref())
        .is_some_and(|claim| claim.read_only);
    let read_only = claim_read_only
        || matches!(device, DeviceType::Cdrom { .. })
        || matches!(
            source,
            DiskSource::CloudInit { .. } | DiskSource::Files { .. } | DiskSource::DownwardMetrics
        )
        || given.is_some_and(|target| target.readonly == Some(true));
    let container_disk = matches!(source, DiskSource::ContainerDisk { .. });
    let ephemeral = volume.is_some_and(|volume| volume.ephemeral.is_some());
    DiskPlan {
        name: disk.name.clone(),
        target,
        controller,
        device,
        read_only,
        overlay: !read_only && (container_disk || ephemeral),
        format: if container_disk {
            FormatPolicy::Probe
        } else {
            FormatPolicy::Raw
        },
        serial: disk.serial.clone().filter(|serial| !serial.is_empty()),
        cache,
        shareable: disk.shareable,
        block_size: match device {
            DeviceType::Disk => block_size(disk.block_size.as_ref()),
            // CD-ROMs have blocks of 2048 bytes, passed-through devices their own.
            DeviceType::Cdrom { .. } | DeviceType::Lun { .. } => BlockSize::Default,
        },
        error_policy: error_policy(disk.error_policy.as_deref()),
        preallocated: false,
        queues,
        io_thread: None,
        boot_order: disk.boot_order.and_then(|order| u32::try_from(order).ok()),
        origin: volume.and_then(Volume::origin),
        source,
    }
}

/// Cache mode of a disk. A shareable disk must not be cached, but a LUN or a CD-ROM may; KubeVirt applies this rule at
/// the start of the VM.
pub(super) fn cache(disk: &Disk, path: &str) -> Result<CacheMode, FieldError> {
    let given = disk.cache.as_deref().unwrap_or_default();
    match (given, disk.shareable && disk.target().0 == "disk") {
        ("", true) => Ok(CacheMode::None),
        ("none", _) => Ok(CacheMode::None),
        (other, true) => {
            let text = format!("a sharable disk requires cache = none got: {other}");
            Err(FieldError::invalid(format!("{path}.cache"), text))
        }
        ("writethrough", _) => Ok(CacheMode::WriteThrough),
        ("writeback", _) => Ok(CacheMode::WriteBack),
        _ => Ok(CacheMode::Auto),
    }
}

pub(super) fn block_size(given: Option<&types::BlockSize>) -> BlockSize {
    let Some(given) = given else {
        return BlockSize::Default;
    };
    let bytes = |size: i64| u32::try_from(size).unwrap_or(512);
    match &given.custom {
        Some(custom) => BlockSize::Custom {
            logical: bytes(custom.logical),
            physical: bytes(custom.physical),
            discard_granularity: custom.discard_granularity.filter(|size| *size != 0).map(bytes),
        },
        None if given.match_volume.as_ref().is_some_and(Feature::is_on) => BlockSize::MatchVolume,
        None => BlockSize::Default,
    }
}

pub(super) fn error_policy(given: Option<&str>) -> ErrorPolicy {
    match given {
        Some("report") => ErrorPolicy::Report,
        Some("ignore") => ErrorPolicy::Ignore,
        Some("enospace") => ErrorPolicy::Enospace,
        _ => ErrorPolicy::Stop,
    }
}
