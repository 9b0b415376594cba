//! The disks of the plan.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use uuid::Uuid;

use super::{CacheMode, DiskPlan, DiskSource, PodResources};
use crate::field::FieldError;
use crate::load::Vmi;
use crate::quantity::Quantity;
use crate::types::{CloudInit, Disk, HostDisk, Volume};

/// The name by which [`PodResources::volumes`] has the files of `kernelBoot.container`.
pub const KERNEL_VOLUME: &str = "kernel-boot-volume";
/// Sizes of disks that are made here are whole multiples of this, in bytes.
const ALIGNMENT: u64 = 1 << 20;
/// KubeVirt's limit of a host name, in characters.
const HOST_NAME: usize = 63;

/// The disks a VMI has: those it lists, then one for each volume that nothing uses.
pub(crate) fn effective(vmi: &Vmi) -> Vec<Disk> {
    let devices = &vmi.spec.domain.devices;
    let mut disks = devices.disks.clone();
    let mut used: std::collections::HashSet<&str> = devices
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
    disks
}

/// Plans every disk.
pub(super) fn plan(
    vmi: &Vmi,
    uuid: Uuid,
    resources: &PodResources,
    errors: &mut Vec<FieldError>,
) -> Vec<DiskPlan> {
    for name in resources.volumes.keys() {
        if name != KERNEL_VOLUME && vmi.spec.volume(name).is_none() {
            let text = format!("no volume is named '{name}', which --volume gives a path to");
            errors.push(FieldError::not_found(vmi.at("volumes"), text));
        }
    }
    let mut disks = Vec::new();
    for (index, disk) in effective(vmi).into_iter().enumerate() {
        let Some(position) = vmi
            .spec
            .volumes
            .iter()
            .position(|volume| volume.name == disk.name)
        else {
            continue;
        };
        let volume = &vmi.spec.volumes[position];
        let place = Place {
            vmi,
            uuid,
            resources,
            path: vmi.at(&format!("volumes[{position}]")),
        };
        let Some((source, sealed)) = place.source(volume).map_err(|error| errors.push(error)).ok() else {
            continue;
        };
        let read_only = sealed
            || disk
                .target()
                .1
                .is_some_and(|target| target.readonly == Some(true));
        disks.push(DiskPlan {
            target: target_name(index),
            read_only,
            serial: disk.serial.filter(|serial| !serial.is_empty()),
            cache: cache(disk.cache.as_deref()),
            shareable: disk.shareable,
            boot_order: disk.boot_order.and_then(|order| u32::try_from(order).ok()),
            source,
            name: disk.name,
        });
    }
    disks
}

/// `vda`, `vdb`, … `vdz`, `vdaa`, …
fn target_name(index: usize) -> String {
    let mut letters = Vec::new();
    let mut rest = index + 1;
    while rest > 0 {
        rest -= 1;
        letters.push(char::from(b'a' + (rest % 26) as u8));
        rest /= 26;
    }
    letters.extend(['d', 'v']);
    letters.iter().rev().collect()
}

fn cache(text: Option<&str>) -> CacheMode {
    match text {
        Some("none") => CacheMode::None,
        Some("writethrough") => CacheMode::WriteThrough,
        Some("writeback") => CacheMode::WriteBack,
        _ => CacheMode::Auto,
    }
}

/// A volume and what is around it.
struct Place<'a> {
    vmi: &'a Vmi,
    uuid: Uuid,
    resources: &'a PodResources,
    path: String,
}

impl Place<'_> {
    /// Where the data is, and whether the guest must not write it whatever the disk says.
    fn source(&self, volume: &Volume) -> Result<(DiskSource, bool), FieldError> {
        let given = self.resources.volumes.get(&volume.name);
        if let Some(disk) = &volume.container_disk {
            let path = self.mapped(
                volume,
                "containerDisk",
                "an image file, or a directory with one in disk/",
            )?;
            let image_path = disk.path.as_deref().filter(|path| !path.is_empty()).map(relative);
            return Ok((DiskSource::ContainerDisk { path, image_path }, false));
        }
        if let Some(claim) = &volume.persistent_volume_claim {
            let path = self.mapped(volume, "persistentVolumeClaim", "a raw image or a block device")?;
            return Ok((DiskSource::File(path), claim.read_only));
        }
        if volume.data_volume.is_some() {
            let path = self.mapped(volume, "dataVolume", "a raw image or a block device")?;
            return Ok((DiskSource::File(path), false));
        }
        if let Some(disk) = &volume.host_disk {
            return Ok((self.host_disk(disk, given)?, false));
        }
        if given.is_some() {
            let text = format!(
                "{} makes its own data; it takes no --volume {}=PATH",
                self.path, volume.name
            );
            return Err(FieldError::invalid(&self.path, text));
        }
        if let Some(disk) = &volume.empty_disk {
            let capacity_bytes = self.size(&volume.name, "emptyDisk.capacity", disk.capacity)?;
            return Ok((DiskSource::EmptyDisk { capacity_bytes }, false));
        }
        if let Some(data) = &volume.cloud_init_no_cloud {
            return Ok((self.cloud_init(data)?, true));
        }
        Err(FieldError::unsupported(
            &self.path,
            "this kind of volume is not supported yet",
        ))
    }

    fn mapped(&self, volume: &Volume, kind: &str, what: &str) -> Result<PathBuf, FieldError> {
        self.resources.volumes.get(&volume.name).cloned().ok_or_else(|| {
            let path = format!("{}.{kind}", self.path);
            let text = format!(
                "{path} has no data here; give {what} with --volume {}=PATH",
                volume.name
            );
            FieldError::required(path, text)
        })
    }

    fn host_disk(&self, disk: &HostDisk, given: Option<&PathBuf>) -> Result<DiskSource, FieldError> {
        let path = given.cloned().unwrap_or_else(|| PathBuf::from(&disk.path));
        if !path.is_absolute() && given.is_none() {
            let field = format!("{}.hostDisk.path", self.path);
            let text = format!("{field} '{}' must be an absolute path", disk.path);
            return Err(FieldError::invalid(field, text));
        }
        let create = disk.disk_type == "DiskOrCreate";
        let create_bytes = if create {
            Some(self.size(&disk.path, "hostDisk.capacity", disk.capacity)?)
        } else {
            None
        };
        Ok(DiskSource::HostDisk { path, create_bytes })
    }

    /// The size of a disk that is made here, rounded down as KubeVirt does.
    fn size(&self, name: &str, field: &str, capacity: Option<Quantity>) -> Result<u64, FieldError> {
        let field = format!("{}.{field}", self.path);
        let Some(capacity) = capacity else {
            let text = format!("{field} is required to make the disk");
            return Err(FieldError::required(field, text));
        };
        match capacity.bytes().unwrap_or(0) / ALIGNMENT * ALIGNMENT {
            0 => {
                let text = format!("the size for volume {name} is too low, must be at least 1MiB");
                Err(FieldError::invalid(field, text))
            }
            bytes => Ok(bytes),
        }
    }

    fn cloud_init(&self, data: &CloudInit) -> Result<DiskSource, FieldError> {
        let meta_data = serde_json::json!({
            "instance-id": self.uuid.to_string(),
            "local-hostname": host_name(self.vmi),
        });
        let user_data = self.text(
            "userDataBase64",
            data.user_data.as_deref(),
            data.user_data_base64.as_deref(),
        )?;
        let network_config = self.text(
            "networkDataBase64",
            data.network_data.as_deref(),
            data.network_data_base64.as_deref(),
        )?;
        Ok(DiskSource::CloudInitNoCloud {
            meta_data: meta_data.to_string(),
            user_data: user_data.unwrap_or_default(),
            network_config,
        })
    }

    fn text(
        &self,
        field: &str,
        plain: Option<&str>,
        encoded: Option<&str>,
    ) -> Result<Option<Vec<u8>>, FieldError> {
        match (plain, encoded) {
            (Some(plain), _) if !plain.is_empty() => Ok(Some(plain.as_bytes().to_vec())),
            (_, Some(encoded)) if !encoded.is_empty() => decode(encoded).map(Some).ok_or_else(|| {
                let path = format!("{}.cloudInitNoCloud.{field}", self.path);
                let text = format!("{path} is not a valid base64 value.");
                FieldError::invalid(path, text)
            }),
            _ => Ok(None),
        }
    }
}

/// Decodes base64, which manifests often break into lines.
pub(crate) fn decode(encoded: &str) -> Option<Vec<u8>> {
    let packed: Vec<u8> = encoded.bytes().filter(|b| !matches!(b, b'\r' | b'\n')).collect();
    STANDARD.decode(packed).ok()
}

/// The guest's host name: `hostname`, else the VMI's name up to its first dot.
fn host_name(vmi: &Vmi) -> String {
    let given = vmi.spec.hostname.as_deref().filter(|name| !name.is_empty());
    let name = given.unwrap_or_else(|| vmi.name.split('.').next().unwrap_or_default());
    name.chars().take(HOST_NAME).collect()
}

/// An absolute path of an image, relative to the image's root.
pub(super) fn relative(path: &str) -> PathBuf {
    Path::new(path)
        .components()
        .filter(|c| matches!(c, std::path::Component::Normal(_)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_count_in_letters() {
        let names: Vec<String> = [0, 1, 25, 26, 51, 52, 701, 702].map(target_name).into();
        assert_eq!(
            names,
            ["vda", "vdb", "vdz", "vdaa", "vdaz", "vdba", "vdzz", "vdaaa"]
        );
    }

    #[test]
    fn a_path_in_an_image_never_leaves_it() {
        assert_eq!(
            relative("/disk/../../etc//./passwd"),
            Path::new("disk/etc/passwd")
        );
    }
}
