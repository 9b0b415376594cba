//! Resolves the source of a volume.

use std::path::{Path, PathBuf};

use base64::engine::{GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine, alphabet};
use serde_json::json;
use uuid::Uuid;

use super::credentials;
use super::disk::{DiskSource, SeedData, SeedLayout};
use super::types::PodResources;
use crate::field::FieldError;
use crate::load::Vmi;
use crate::quantity::Quantity;
use crate::types::{CloudInit, HostDisk, Volume};

/// Name in [`PodResources::volumes`] of the files of `kernelBoot.container`.
pub const KERNEL_VOLUME: &str = "kernel-boot-volume";
/// Sizes of created disks are multiples of this, in bytes.
const ALIGNMENT: u64 = 1 << 20;
/// Maximum length of a host name in characters.
const HOST_NAME: usize = 63;
/// Keys of a Secret with user data, and with network configuration, in lower case.
pub(super) const USER_DATA: &str = "userdata";
pub(super) const NETWORK_DATA: &str = "networkdata";
/// Default label of a disk made of files.
const LABEL: &str = "cfgdata";
/// Maximum length of an ISO 9660 volume label in bytes.
const LABEL_LENGTH: usize = 32;
/// Description of an image for error texts.
const IMAGE: &str = "a raw image or a block device";

/// Context for resolving one volume.
pub(super) struct VolumeContext<'a> {
    pub(super) vmi: &'a Vmi,
    pub(super) uuid: Uuid,
    pub(super) resources: &'a PodResources,
    /// Path of the volume in the manifest.
    pub(super) path: String,
}

impl VolumeContext<'_> {
    /// Resolves the source of a volume.
    pub(super) fn source(&self, volume: &Volume) -> Result<DiskSource, FieldError> {
        if let Some(disk) = &volume.container_disk {
            let what = "an image file, a directory with one in disk/, an OCI layout or an image archive";
            let path = self.mapped(volume, "containerDisk", what, "PATH")?;
            let image_path = disk.path.as_deref().filter(|path| !path.is_empty()).map(relative);
            return Ok(DiskSource::ContainerDisk { path, image_path });
        }
        let claim = [
            ("persistentVolumeClaim", volume.persistent_volume_claim.is_some()),
            ("dataVolume", volume.data_volume.is_some()),
            ("ephemeral", volume.ephemeral.is_some()),
        ];
        if let Some((kind, _)) = claim.into_iter().find(|(_, given)| *given) {
            return self.mapped(volume, kind, IMAGE, "PATH").map(DiskSource::File);
        }
        if let Some(disk) = &volume.host_disk {
            return self.host_disk(&volume.name, disk);
        }
        if let Some(files) = self.files(volume) {
            return files;
        }
        let seed = [
            (&volume.cloud_init_no_cloud, SeedLayout::NoCloud),
            (&volume.cloud_init_config_drive, SeedLayout::ConfigDrive),
        ];
        for (data, layout) in seed {
            if let Some(data) = data {
                return self.cloud_init(volume, data, layout);
            }
        }
        self.nothing_given(volume)?;
        if volume.downward_metrics.is_some() {
            return Ok(DiskSource::DownwardMetrics);
        }
        if let Some(disk) = &volume.empty_disk {
            let capacity_bytes = self.size(&volume.name, "emptyDisk.capacity", disk.capacity)?;
            return Ok(DiskSource::EmptyDisk { capacity_bytes });
        }
        Err(FieldError::unsupported(
            &self.path,
            "this volume type is not supported yet",
        ))
    }

    /// Checks for errors that do not depend on the resources of the caller.
    pub(super) fn check(&self, volume: &Volume) -> Result<(), FieldError> {
        if let Some(disk) = &volume.empty_disk {
            self.size(&volume.name, "emptyDisk.capacity", disk.capacity)?;
        }
        if let Some(disk) = &volume.host_disk {
            self.host_disk(&volume.name, disk)?;
        }
        if let Some((kind, _, label)) = file_kind(volume) {
            self.label(kind, label)?;
        }
        Ok(())
    }

    /// Path that the caller has to give for a volume.
    fn mapped(&self, volume: &Volume, kind: &str, what: &str, form: &str) -> Result<PathBuf, FieldError> {
        self.resources.volumes.get(&volume.name).cloned().ok_or_else(|| {
            let path = format!("{}.{kind}", self.path);
            let text = format!(
                "{path} needs data: pass {what} with --volume {}={form}",
                volume.name
            );
            FieldError::required(path, text)
        })
    }

    /// Files of a Secret's key, in either spelling.
    fn seed_files(&self, volume: &Volume, key: &str) -> Vec<PathBuf> {
        let given = self.resources.seed_files.get(&volume.name);
        let of_key = given
            .into_iter()
            .flatten()
            .filter(|(name, _)| name.eq_ignore_ascii_case(key));
        of_key.map(|(_, path)| path.clone()).collect()
    }

    fn nothing_given(&self, volume: &Volume) -> Result<(), FieldError> {
        if !self.resources.volumes.contains_key(&volume.name) {
            return Ok(());
        }
        let text = format!("{} needs no data: omit --volume {}=PATH", self.path, volume.name);
        Err(FieldError::invalid(&self.path, text))
    }

    fn host_disk(&self, name: &str, disk: &HostDisk) -> Result<DiskSource, FieldError> {
        if !Path::new(&disk.path).is_absolute() {
            let field = format!("{}.hostDisk.path", self.path);
            let text = format!("{field} '{}' must be an absolute path", disk.path);
            return Err(FieldError::invalid(field, text));
        }
        let given = self.resources.volumes.get(name).cloned();
        let path = given.unwrap_or_else(|| PathBuf::from(&disk.path));
        // Without a capacity the file must exist. The monitor reports a missing file when it opens the disk.
        let create_bytes = match disk.capacity {
            Some(_) if disk.disk_type == "DiskOrCreate" => {
                Some(self.size(name, "hostDisk.capacity", disk.capacity)?)
            }
            _ => None,
        };
        Ok(DiskSource::HostDisk { path, create_bytes })
    }

    /// Size of a disk to create, rounded down as KubeVirt does.
    fn size(&self, name: &str, field: &str, capacity: Option<Quantity>) -> Result<u64, FieldError> {
        let field = format!("{}.{field}", self.path);
        let Some(capacity) = capacity else {
            let text = format!("{field} is required to create the disk");
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

    /// Source of a configMap, secret, downwardAPI or serviceAccount volume; none for other types.
    fn files(&self, volume: &Volume) -> Option<Result<DiskSource, FieldError>> {
        let (kind, optional, label) = file_kind(volume)?;
        Some(self.label(kind, label).and_then(|label| {
            let what = "a directory with a file for each key";
            let dir = match self.mapped(volume, kind, what, "DIR") {
                Ok(dir) => Some(dir),
                Err(_) if optional => None,
                Err(missing) => return Err(missing),
            };
            Ok(DiskSource::Files { dir, label })
        }))
    }

    fn label(&self, kind: &str, given: Option<&str>) -> Result<String, FieldError> {
        let label = given.filter(|label| !label.is_empty()).unwrap_or(LABEL);
        if label.len() > LABEL_LENGTH || !label.bytes().all(|b| b == b' ' || b.is_ascii_graphic()) {
            let field = format!("{}.{kind}.volumeLabel", self.path);
            let text =
                format!("{field} must have at most {LABEL_LENGTH} characters, all of them printable ASCII");
            return Err(FieldError::invalid(field, text));
        }
        Ok(label.to_owned())
    }

    fn cloud_init(
        &self,
        volume: &Volume,
        data: &CloudInit,
        layout: SeedLayout,
    ) -> Result<DiskSource, FieldError> {
        let kind = match layout {
            SeedLayout::NoCloud => "cloudInitNoCloud",
            SeedLayout::ConfigDrive => "cloudInitConfigDrive",
        };
        if !has_secret(data) {
            self.nothing_given(volume)?;
        }
        let secret = |field: &str, key: &str| {
            let files = self.seed_files(volume, key);
            if !files.is_empty() {
                return Ok(Some(SeedData::SecretFiles(files)));
            }
            let what = "a directory with the Secret's files";
            self.mapped(volume, &format!("{kind}.{field}"), what, "DIR")
                .map(|dir| Some(SeedData::Secret(dir)))
        };
        let inline = |field: &str, plain: &Option<String>, encoded: &Option<String>| {
            self.inline(kind, field, plain.as_deref(), encoded.as_deref())
                .map(|bytes| bytes.map(SeedData::Inline))
        };
        let user_data = match &data.secret_ref {
            Some(_) => secret("secretRef", USER_DATA)?,
            None => inline("userDataBase64", &data.user_data, &data.user_data_base64)?,
        };
        let network_data = match &data.network_data_secret_ref {
            Some(_) => secret("networkDataSecretRef", NETWORK_DATA)?,
            None => inline("networkDataBase64", &data.network_data, &data.network_data_base64)?,
        };
        Ok(DiskSource::CloudInit {
            layout,
            meta_data: self.meta_data(layout),
            public_keys: self.public_keys(layout),
            user_data: user_data.unwrap_or(SeedData::Inline(Vec::new())),
            network_data,
        })
    }

    fn public_keys(&self, layout: SeedLayout) -> Vec<PathBuf> {
        credentials::public_keys(self.vmi, self.resources, |credential| {
            let method = credential
                .ssh_public_key
                .as_ref()
                .map(|key| &key.propagation_method);
            method.is_some_and(|method| match layout {
                SeedLayout::NoCloud => method.no_cloud.is_some(),
                SeedLayout::ConfigDrive => method.config_drive.is_some(),
            })
        })
    }

    fn meta_data(&self, layout: SeedLayout) -> String {
        let (vmi, uuid) = (self.vmi, self.uuid.to_string());
        let (mut data, instancetype) = match layout {
            SeedLayout::NoCloud => (
                json!({"instance-id": uuid, "local-hostname": host_name(vmi)}),
                "instance-type",
            ),
            SeedLayout::ConfigDrive => (
                json!({
                    "instance_id": format!("{}.{}", vmi.name, vmi.namespace),
                    "hostname": host_name(vmi),
                    "uuid": uuid,
                }),
                "instance_type",
            ),
        };
        if let Some(name) = instancetype_name(vmi) {
            data[instancetype] = json!(name);
        }
        data.to_string()
    }

    fn inline(
        &self,
        kind: &str,
        field: &str,
        plain: Option<&str>,
        encoded: Option<&str>,
    ) -> Result<Option<Vec<u8>>, FieldError> {
        match (plain, encoded) {
            (Some(plain), _) if !plain.is_empty() => Ok(Some(plain.as_bytes().to_vec())),
            (_, Some(encoded)) if !encoded.is_empty() => decode(encoded).map(Some).ok_or_else(|| {
                let path = format!("{}.{kind}.{field}", self.path);
                let text = format!("{path} is not a valid base64 value.");
                FieldError::invalid(path, text)
            }),
            _ => Ok(None),
        }
    }
}

/// Data of a volume that is not in the manifest, such as an image.
pub(super) enum ExternalData {
    /// The caller gives it.
    Needed,
    /// The volume has a source without it.
    Optional,
    /// There is none.
    Refused,
}

impl ExternalData {
    pub(super) fn of(volume: &Volume) -> Self {
        let seeds = [&volume.cloud_init_no_cloud, &volume.cloud_init_config_drive];
        let needed = volume.container_disk.is_some()
            || volume.persistent_volume_claim.is_some()
            || volume.data_volume.is_some()
            || volume.ephemeral.is_some()
            || seeds.into_iter().flatten().any(has_secret);
        match file_kind(volume) {
            _ if needed => Self::Needed,
            Some((_, false, _)) => Self::Needed,
            Some(_) => Self::Optional,
            None if volume.host_disk.is_some() => Self::Optional,
            None => Self::Refused,
        }
    }
}

fn has_secret(data: &CloudInit) -> bool {
    data.secret_ref.is_some() || data.network_data_secret_ref.is_some()
}

/// Type, `optional` and label of a volume made of files; none for other types.
fn file_kind(volume: &Volume) -> Option<(&'static str, bool, Option<&str>)> {
    if let Some(map) = &volume.config_map {
        Some(("configMap", map.optional, map.volume_label.as_deref()))
    } else if let Some(secret) = &volume.secret {
        Some(("secret", secret.optional, secret.volume_label.as_deref()))
    } else if let Some(api) = &volume.downward_api {
        Some(("downwardAPI", false, api.volume_label.as_deref()))
    } else if volume.service_account.is_some() {
        Some(("serviceAccount", false, None))
    } else {
        None
    }
}

/// Base64 as Go decodes it: the last character may have bits that are not used.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true),
);

/// Decodes base64, ignoring line breaks.
pub(crate) fn decode(encoded: &str) -> Option<Vec<u8>> {
    let packed: Vec<u8> = encoded.bytes().filter(|b| !matches!(b, b'\r' | b'\n')).collect();
    BASE64.decode(packed).ok()
}

/// The guest's host name: `hostname`, else the VMI's name up to its first dot.
pub(super) fn host_name(vmi: &Vmi) -> String {
    let given = vmi.spec.hostname.as_deref().filter(|name| !name.is_empty());
    let name = given.unwrap_or_else(|| vmi.name.split('.').next().unwrap_or_default());
    name.chars().take(HOST_NAME).collect()
}

/// Name of the VM's instance type, which KubeVirt writes in the annotations: that of the whole cluster comes first.
fn instancetype_name(vmi: &Vmi) -> Option<&str> {
    let keys = [
        "kubevirt.io/cluster-instancetype-name",
        "kubevirt.io/instancetype-name",
    ];
    let mut names = keys.iter().filter_map(|key| vmi.annotations.get(*key));
    names.find(|name| !name.is_empty()).map(String::as_str)
}

/// Converts an absolute path in an image to one relative to the root of the image.
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
    fn a_path_in_an_image_never_leaves_it() {
        assert_eq!(
            relative("/disk/../../etc//./passwd"),
            Path::new("disk/etc/passwd")
        );
    }
}
