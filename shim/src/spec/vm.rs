//! The plan of a VM, from the spec of its container.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use husk_vmi::types::Volume;
use husk_vmi::{
    CauseReason, DiskSource, FieldError, KERNEL_VOLUME, Loaded, PodResources, VmPlan, Vmi, credential_volume,
    load, plan,
};
use husk_volumes::PodMounts;
use oci_spec::runtime::Spec;
use uuid::Uuid;

use super::annotations::{VMI, VOLUME, VOLUME_PREFIX, annotation, cri, display_name, uid};
use super::devices::devices;
use super::error::SpecError;
use super::limit::MemoryLimit;
use super::mounts::{CLAIMS, MountKind, mounts};

/// A VM and the resources of its container.
#[derive(Debug, Clone)]
pub struct VmContainer {
    /// The VM.
    pub plan: VmPlan,
    /// The manifest's metadata, for `husk inspect`.
    pub vmi: serde_json::Value,
    /// Mounts and devices that it may open.
    pub given: PodMounts,
    /// Scratch directory for ephemeral data, if there is a mount for it.
    pub ephemeral: Option<PathBuf>,
}

impl VmContainer {
    /// Plans the VM of a container. `limit` is the container's limit of memory, `rootfs` its root filesystem, `volumes`
    /// those of the pod's volume containers, by volume.
    ///
    /// # Errors
    /// The manifest has errors, the pod does not have a volume, or a limit is too small.
    pub fn new(
        spec: &Spec,
        limit: &MemoryLimit,
        vmi: &Vmi,
        rootfs: PathBuf,
        volumes: &BTreeMap<String, PathBuf>,
    ) -> Result<VmContainer, SpecError> {
        husk_vmi::validate(vmi).map_err(SpecError::Fields)?;
        let mut offer = PodVolumeSources::new(spec)?;
        offer.containers(vmi, spec, rootfs, volumes);
        let resources = offer.resources(vmi, spec)?;
        let plan = plan(&offer.at_start(vmi), &resources).map_err(SpecError::Fields)?;
        offer.check_writable(vmi, &plan)?;
        limit.check(&plan, &display_name(spec), &vmi.memory_field())?;
        Ok(VmContainer {
            vmi: serde_json::json!({
                "name": vmi.name,
                "namespace": vmi.namespace,
                "uid": vmi.uid,
                "labels": vmi.labels,
                "annotations": vmi.annotations,
            }),
            given: PodMounts {
                devices: offer.numbers,
                hotplug: offer.hotplug,
            },
            ephemeral: offer.ephemeral,
            plan,
        })
    }
}

/// Parses the VMI in the annotation of a container.
///
/// # Errors
/// There is none, or it is no manifest of one VMI.
pub fn annotated_vmi(spec: &Spec) -> Result<Vmi, SpecError> {
    let text = annotation(spec, VMI).ok_or_else(|| SpecError::NoVmi {
        container: display_name(spec),
    })?;
    load_vmi(text, spec)
}

/// Parses a VMI. Its namespace is the pod's unless it names another.
pub fn load_vmi(text: &str, spec: &Spec) -> Result<Vmi, SpecError> {
    let mut loaded = load(text)?;
    match (loaded.pop(), loaded.len()) {
        (Some(Loaded::Vmi(mut vmi)), 0) => {
            if let Some(namespace) = annotation(spec, cri::SANDBOX_NAMESPACE)
                && vmi.namespace == "default"
                && !namespace.is_empty()
            {
                vmi.namespace = namespace.to_owned();
            }
            Ok(*vmi)
        }
        (last, others) => Err(SpecError::Objects(others + usize::from(last.is_some()))),
    }
}

/// The volumes of a VM that are containers' root filesystems.
pub fn volumes_of(vmi: &Vmi) -> impl Iterator<Item = &str> {
    let disks = vmi.spec.volumes.iter();
    let disks = disks.filter(|volume| volume.container_disk.is_some());
    let kernel = vmi.spec.domain.firmware.kernel_boot.as_ref();
    let kernel = kernel.filter(|boot| boot.container.is_some());
    disks
        .map(|volume| volume.name.as_str())
        .chain(kernel.map(|_| KERNEL_VOLUME))
}

/// The data that a pod has for its VM's volumes.
#[derive(Debug, Default)]
struct PodVolumeSources {
    /// Sources, by volume.
    mounts: BTreeMap<String, PathBuf>,
    devices: BTreeMap<String, PathBuf>,
    containers: BTreeMap<String, PathBuf>,
    /// Image volumes of containerDisks, by the index of the VMI's volume.
    image_volumes: BTreeMap<usize, PathBuf>,
    /// Image volume with the files of kernelBoot.
    kernel_boot: Option<PathBuf>,
    /// Values of the keys of cloud-init's Secrets, by volume.
    seed_files: BTreeMap<String, Vec<(String, PathBuf)>>,
    service_account: Option<PathBuf>,
    ephemeral: Option<PathBuf>,
    hotplug: Option<PathBuf>,
    numbers: BTreeMap<PathBuf, u64>,
    /// Volumes whose mounts or devices are read-only.
    read_only: Vec<String>,
}

impl PodVolumeSources {
    fn new(spec: &Spec) -> Result<PodVolumeSources, SpecError> {
        let mut offer = PodVolumeSources::default();
        for mount in mounts(spec) {
            match mount.kind {
                MountKind::Volume(name) => {
                    if mount.read_only {
                        offer.read_only.push(name.clone());
                    }
                    offer.mounts.insert(name, mount.source);
                }
                MountKind::ImageVolume(index) => drop(offer.image_volumes.insert(index, mount.source)),
                MountKind::KernelBoot => offer.kernel_boot = Some(mount.source),
                MountKind::SecretKey { volume, key } => {
                    let files = offer.seed_files.entry(volume).or_default();
                    files.push((key, mount.source));
                }
                MountKind::ServiceAccount => offer.service_account = Some(mount.source),
                MountKind::Ephemeral => offer.ephemeral = Some(mount.source),
                MountKind::Hotplug => offer.hotplug = Some(mount.source),
            }
        }
        for device in devices(spec)? {
            offer.numbers.insert(device.path.clone(), device.number);
            // A claim's device comes before its mount.
            offer.read_only.retain(|name| *name != device.name);
            if device.read_only {
                offer.read_only.push(device.name.clone());
            }
            offer.devices.insert(device.name, device.path);
        }
        Ok(offer)
    }

    /// The container's own root filesystem is the volume that its annotation names, else the only volume that needs a
    /// container and has none.
    fn containers(&mut self, vmi: &Vmi, spec: &Spec, rootfs: PathBuf, volumes: &BTreeMap<String, PathBuf>) {
        self.containers = volumes.clone();
        let image_volumes = vmi.spec.volumes.iter().enumerate().filter_map(|(index, volume)| {
            volume.container_disk.as_ref()?;
            Some((volume.name.clone(), self.image_volumes.get(&index)?.clone()))
        });
        self.containers.extend(image_volumes);
        if let Some(files) = &self.kernel_boot {
            self.containers.insert(KERNEL_VOLUME.to_owned(), files.clone());
        }
        let own = match annotation(spec, VOLUME) {
            Some(volume) => Some(volume),
            None => {
                let mut missing = volumes_of(vmi).filter(|volume| !volumes.contains_key(*volume));
                let first = missing.next();
                // In a pod a volume has a container of its own, which may not exist yet.
                let alone = annotation(spec, cri::CONTAINER_TYPE).is_none();
                first.filter(|_| alone && missing.next().is_none())
            }
        };
        if let Some(volume) = own {
            self.containers.entry(volume.to_owned()).or_insert(rootfs);
        }
    }

    fn resources(&self, vmi: &Vmi, spec: &Spec) -> Result<PodResources, SpecError> {
        let (mut volumes, mut errors) = (BTreeMap::new(), Vec::new());
        for (index, volume) in vmi.spec.volumes.iter().enumerate() {
            let field = format!("spec.volumes[{index}]");
            match self.data(volume, &field) {
                Ok(Some(path)) => {
                    volumes.insert(volume.name.clone(), path);
                }
                Ok(None) => {}
                Err(error) => errors.push(error),
            }
        }
        for (index, credential) in vmi.spec.access_credentials.iter().enumerate() {
            let volume = credential_volume(credential.secret());
            match self.mounts.get(&volume) {
                Some(path) => drop(volumes.insert(volume, path.clone())),
                None => errors.push(no_secret(index, credential.secret())),
            }
        }
        if volumes_of(vmi).any(|name| name == KERNEL_VOLUME) {
            match self.containers.get(KERNEL_VOLUME) {
                Some(path) => drop(volumes.insert(KERNEL_VOLUME.into(), path.clone())),
                None => errors.push(no_container(
                    "spec.domain.firmware.kernelBoot.container",
                    KERNEL_VOLUME,
                )),
            }
        }
        if !errors.is_empty() {
            return Err(SpecError::Fields(errors));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let uuid = uid(spec).and_then(|uid| Uuid::parse_str(uid).ok());
        Ok(PodResources {
            volumes,
            seed_files: self.seed_files.clone(),
            kernel: None,
            uuid: uuid.unwrap_or_else(Uuid::new_v4),
            now_unix_seconds: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
        })
    }

    /// The VMI without hotpluggable volumes that the pod does not have. They are plugged when the VM runs; a CD-ROM
    /// drive is empty until then.
    fn at_start(&self, vmi: &Vmi) -> Vmi {
        let comes = |volume: &Volume| {
            let name = volume.name.as_str();
            volume.is_hotpluggable() && !self.devices.contains_key(name) && !self.mounts.contains_key(name)
        };
        let mut start = vmi.clone();
        start.spec.volumes.retain(|volume| !comes(volume));
        let disks = &mut start.spec.domain.devices.disks;
        disks.retain(|disk| disk.cdrom.is_some() || !vmi.spec.volume(&disk.name).is_some_and(comes));
        start
    }

    /// The source of a volume; none for a volume that needs no source.
    fn data(&self, volume: &Volume, field: &str) -> Result<Option<PathBuf>, FieldError> {
        let name = volume.name.as_str();
        if volume.container_disk.is_some() {
            let found = self.containers.get(name).cloned();
            return found
                .map(Some)
                .ok_or_else(|| no_container(&format!("{field}.containerDisk"), name));
        }
        let claim = volume.persistent_volume_claim.is_some()
            || volume.data_volume.is_some()
            || volume.ephemeral.is_some();
        if claim {
            let found = self.devices.get(name).or_else(|| self.mounts.get(name));
            if found.is_none() && volume.is_hotpluggable() {
                return Ok(None);
            }
            return found.cloned().map(Some).ok_or_else(|| {
                let text = format!(
                    "the VM's container provides no data for volume {name:?}: mount its claim at {CLAIMS}/{name}, or give it \
                     as the device /dev/{name}"
                );
                required(field, text)
            });
        }
        if let Some(disk) = &volume.host_disk {
            let directory = self.mounts.get(name);
            let file = std::path::Path::new(&disk.path).file_name();
            return match (directory, file) {
                (Some(directory), Some(file)) => Ok(Some(directory.join(file))),
                _ => {
                    let field = format!("{field}.hostDisk.path");
                    let text = format!(
                        "paths of the node are not opened for pods: mount the directory of {:?} at {CLAIMS}/{name}",
                        disk.path
                    );
                    Err(required(&field, text))
                }
            };
        }
        if volume.service_account.is_some() {
            let found = self.service_account.clone();
            return found.map(Some).ok_or_else(|| {
                let text = "the VM's container has no service account mounted at \
                            /var/run/secrets/kubernetes.io/serviceaccount";
                required(&format!("{field}.serviceAccount"), text.into())
            });
        }
        // The plan reports the others that need a source.
        let secret = |cloud_init: &Option<husk_vmi::types::CloudInit>| {
            cloud_init
                .as_ref()
                .is_some_and(|data| data.secret_ref.is_some() || data.network_data_secret_ref.is_some())
        };
        let (kind, needed) = if let Some(map) = &volume.config_map {
            ("config-map", !map.optional)
        } else if let Some(object) = &volume.secret {
            ("secret", !object.optional)
        } else if volume.downward_api.is_some() {
            ("downwardapi", true)
        } else if secret(&volume.cloud_init_no_cloud) || secret(&volume.cloud_init_config_drive) {
            ("secret", true)
        } else {
            return Ok(None);
        };
        match self.mounts.get(name) {
            None if self.seed_files.contains_key(name) => Ok(None),
            None if needed => {
                let text = format!(
                    "the VM's container provides no data for volume {name:?}: mount it at \
                     /var/run/kubevirt-private/{kind}/{name}"
                );
                Err(required(field, text))
            }
            found => Ok(found.cloned()),
        }
    }

    /// Refuses writable disks on read-only mounts and devices.
    fn check_writable(&self, vmi: &Vmi, plan: &VmPlan) -> Result<(), SpecError> {
        let wrong = |disk: &&husk_vmi::DiskPlan| {
            let written = !disk.read_only && !disk.overlay;
            let mounted = matches!(disk.source, DiskSource::File(_) | DiskSource::HostDisk { .. });
            written && mounted && self.read_only.contains(&disk.name)
        };
        let errors: Vec<FieldError> = plan
            .disks
            .iter()
            .filter(wrong)
            .map(|disk| {
                let disks = &vmi.spec.domain.devices.disks;
                let index = disks.iter().position(|given| given.name == disk.name);
                FieldError {
                    reason: CauseReason::FieldValueInvalid,
                    field: format!("spec.domain.devices.disks[{}]", index.unwrap_or_default()),
                    message: format!(
                        "volume {:?} is read-only in the pod: make the disk read-only too, or the volume writable",
                        disk.name
                    ),
                }
            })
            .collect();
        match errors.is_empty() {
            true => Ok(()),
            false => Err(SpecError::Fields(errors)),
        }
    }
}

fn required(field: &str, message: String) -> FieldError {
    FieldError {
        reason: CauseReason::FieldValueRequired,
        message,
        field: field.to_owned(),
    }
}

fn no_secret(index: usize, secret: &str) -> FieldError {
    let field = format!("spec.accessCredentials[{index}]");
    let text = format!("{field}: the Secret {secret:?} is not mounted in this pod");
    required(&field, text)
}

fn no_container(field: &str, volume: &str) -> FieldError {
    let text = format!(
        "no container of this pod provides volume {volume:?} yet: add one named {VOLUME_PREFIX}{volume}, before the \
         VM's own in the list"
    );
    required(field, text)
}
