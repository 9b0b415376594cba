//! The data of a VM's volumes on this machine: claims, images, and the files of Secrets and ConfigMaps.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use husk_images::Event;
use husk_objects::{Key, Kind, Objects};
use husk_vmi::credential_volume;
use husk_vmi::objects::{ConfigMap, ObjectKind, Secret};
use husk_vmi::types::Volume;
use serde_json::Value;

use super::object_files::{ObjectFiles, downward_field};
use super::vm::ExpandedVm;
use super::{LocalStores, data_volume};
use crate::failure::{Failure, chain};
use crate::image_volumes::ImageVolumes;
use crate::import_program;
use crate::vm_ref::VmRef;

/// Paths of the data of a VM's volumes.
#[derive(Debug, Default)]
pub(crate) struct Data {
    /// As [`husk_vmi::PodResources::volumes`].
    pub volumes: BTreeMap<String, PathBuf>,
    /// As [`husk_vmi::PodResources::seed_files`].
    pub seed_files: BTreeMap<String, Vec<(String, PathBuf)>>,
}

/// The error of data that is missing now, and may be there later.
#[derive(Debug)]
pub(crate) struct DataError {
    /// The VM's `printableStatus`.
    pub status: &'static str,
    pub text: String,
}

/// A step of what a VM waits for, as one line.
pub(crate) type Report<'a> = dyn FnMut(&str) + 'a;

impl DataError {
    pub(crate) fn new(status: &'static str, text: impl Into<String>) -> DataError {
        DataError {
            status,
            text: text.into(),
        }
    }

    /// The error of a failed step.
    pub(crate) fn of(status: &'static str, failure: Failure) -> DataError {
        let text = match failure {
            Failure::Runtime(text) | Failure::Usage(text) => text,
            Failure::Manifest(lines) => lines.join("; "),
            Failure::Ended(status) => format!("exit status {status}"),
        };
        DataError { status, text }
    }
}

/// Provides the data of the volumes of `vm`, or only of those that `wanted` chooses.
pub(super) struct Provider<'a> {
    pub stores: &'a LocalStores,
    pub objects: &'a Objects,
    pub vm: &'a ExpandedVm,
}

impl Data {
    /// Pulls images, waits for or makes the claims of DataVolumes, and writes the files of Secrets and ConfigMaps.
    ///
    /// # Errors
    /// See [`DataError`].
    pub(crate) fn provide(
        stores: &LocalStores,
        objects: &Objects,
        vm: &ExpandedVm,
        files: &ObjectFiles,
        report: &mut Report<'_>,
    ) -> Result<Data, DataError> {
        let provider = Provider { stores, objects, vm };
        let mut data = Data::default();
        for (index, volume) in vm.vmi.spec.volumes.iter().enumerate() {
            if let Some(claim) = claim_of(volume) {
                let path = provider.claim(claim, report)?;
                data.volumes.insert(volume.name.clone(), path);
            } else if let Some(directory) = provider.files(index, volume, files)? {
                data.volumes.insert(volume.name.clone(), directory);
            }
            let seed = provider.seed(index, volume, files)?;
            if !seed.is_empty() {
                data.seed_files.insert(volume.name.clone(), seed);
            }
        }
        for credential in &vm.vmi.spec.access_credentials {
            let name = credential.secret();
            let volume = credential_volume(name);
            let directory = files.write(&volume, bytes(provider.secret(name)?));
            let directory = directory.map_err(|error| DataError::new("CrashLoopBackOff", chain(&error)))?;
            data.volumes.insert(volume, directory);
        }
        let images = provider.images(&data.volumes, report)?;
        data.volumes.extend(images);
        Ok(data)
    }
}

/// Writes the key `wanted` of a cloud-init Secret, in whatever case, as a file. Without the key the path is that of a
/// directory, which the kubelet mounts too: the other key may be there.
fn seed_file(files: &ObjectFiles, directory: &str, wanted: &str, secret: &Secret) -> io::Result<PathBuf> {
    let key = secret
        .data
        .iter()
        .find(|(key, _)| key.eq_ignore_ascii_case(wanted));
    let directory = files.write(
        directory,
        key.map(|(key, content)| (key.as_str(), content.as_slice())),
    )?;
    Ok(match key {
        Some((key, _)) => directory.join(key),
        None => directory,
    })
}

/// Name of the claim behind a volume; a DataVolume's claim has its name.
pub(crate) fn claim_of(volume: &Volume) -> Option<&str> {
    let claim = volume.persistent_volume_claim.as_ref();
    let ephemeral = volume.ephemeral.as_ref();
    let ephemeral = ephemeral.and_then(|volume| volume.persistent_volume_claim.as_ref());
    let claim = claim.or(ephemeral).map(|claim| claim.claim_name.as_str());
    claim.or(volume.data_volume.as_ref().map(|data| data.name.as_str()))
}

impl Provider<'_> {
    /// Path of a claim's image. The claim of a DataVolume is made.
    fn claim(&self, claim: &str, report: &mut Report<'_>) -> Result<PathBuf, DataError> {
        let namespace = &self.vm.vmi.namespace;
        let name = VmRef {
            namespace: namespace.clone(),
            name: claim.to_owned(),
        };
        data_volume::refuse_deleted(self.stores, &name)?;
        if !self.stores.claims.has(namespace, claim) {
            let key = Key::new(Kind::DataVolume, namespace, claim);
            match self.objects.get(&key) {
                Some(_) => data_volume::import(self.stores, self.objects, &name, report)?,
                None => {
                    let text = format!(
                        "PVC {claim} not found: apply it, or `husk volume create {name} --size SIZE`"
                    );
                    return Err(DataError::new("ErrorPvcNotFound", text));
                }
            }
        }
        Ok(self.stores.claims.image(namespace, claim))
    }

    /// The directory of a volume made of files, if it is one.
    fn files(
        &self,
        index: usize,
        volume: &Volume,
        files: &ObjectFiles,
    ) -> Result<Option<PathBuf>, DataError> {
        let directory = format!("volume-{index}");
        let written = |result: io::Result<PathBuf>| {
            let directory = result.map_err(|error| DataError::new("CrashLoopBackOff", chain(&error)))?;
            Ok(Some(directory))
        };
        if let Some(map) = &volume.config_map {
            return match self.config_map(&map.name) {
                Ok(found) => written(files.write(&directory, found.files())),
                Err(_) if map.optional => Ok(None),
                Err(error) => Err(error),
            };
        }
        if let Some(secret) = &volume.secret {
            return match self.secret(&secret.secret_name) {
                Ok(found) => written(files.write(&directory, bytes(found))),
                Err(_) if secret.optional => Ok(None),
                Err(error) => Err(error),
            };
        }
        if volume.downward_api.is_some() {
            let items = self.downward_items(index)?;
            let items = items.iter().map(|(path, text)| (path.as_str(), text.as_bytes()));
            return written(files.write(&directory, items));
        }
        Ok(None)
    }

    /// Paths and texts of a downwardAPI volume.
    fn downward_items(&self, index: usize) -> Result<Vec<(String, String)>, DataError> {
        let items = self.value(index, "/downwardAPI/fields").and_then(Value::as_array);
        let mut found = Vec::new();
        for (item, entry) in items.into_iter().flatten().enumerate() {
            let field = self.field(index, &format!("downwardAPI.fields[{item}]"));
            let wrong = |reason: &str| DataError::new("CrashLoopBackOff", format!("{field}: {reason}"));
            let path = entry["path"].as_str().unwrap_or_default();
            let parts = std::path::Path::new(path).components();
            if path.is_empty()
                || !parts
                    .into_iter()
                    .all(|part| matches!(part, std::path::Component::Normal(_)))
            {
                return Err(wrong("path must be a relative path without `..`"));
            }
            let from = entry.pointer("/fieldRef/fieldPath").and_then(Value::as_str);
            let from = from.ok_or_else(|| wrong("only fieldRef is known on a machine without a cluster"))?;
            let text = downward_field(&self.vm.manifest, from).map_err(|reason| wrong(&reason))?;
            found.push((path.to_owned(), text));
        }
        Ok(found)
    }

    /// Files of the Secrets of cloud-init.
    fn seed(
        &self,
        index: usize,
        volume: &Volume,
        files: &ObjectFiles,
    ) -> Result<Vec<(String, PathBuf)>, DataError> {
        let kind = match (&volume.cloud_init_no_cloud, &volume.cloud_init_config_drive) {
            (Some(_), _) => "cloudInitNoCloud",
            (_, Some(_)) => "cloudInitConfigDrive",
            _ => return Ok(Vec::new()),
        };
        let inline = ["userData", "userDataBase64", "networkData", "networkDataBase64"];
        let mut any = inline
            .iter()
            .any(|field| self.value(index, &format!("/{kind}/{field}")).is_some());
        let mut missing = None;
        let mut seed = Vec::new();
        for (reference, wanted) in [("secretRef", "userdata"), ("networkDataSecretRef", "networkdata")] {
            let path = format!("/{kind}/{reference}/name");
            let Some(name) = self.value(index, &path).and_then(Value::as_str) else {
                continue;
            };
            let path = seed_file(
                files,
                &format!("seed-{index}-{wanted}"),
                wanted,
                self.secret(name)?,
            )
            .map_err(|error| DataError::new("CrashLoopBackOff", chain(&error)))?;
            if path.is_dir() {
                let field = self.field(index, &format!("{kind}.{reference}"));
                missing = missing.or(Some(format!("{field}: the Secret {name} has no key {wanted}")));
            } else {
                any = true;
            }
            seed.push((wanted.to_owned(), path));
        }
        match missing {
            Some(text) if !any => Err(DataError::new("CrashLoopBackOff", text)),
            _ => Ok(seed),
        }
    }

    /// Pulls the images of volumes that are not in `given`.
    fn images(
        &self,
        given: &BTreeMap<String, PathBuf>,
        report: &mut Report<'_>,
    ) -> Result<BTreeMap<String, PathBuf>, DataError> {
        let images = ImageVolumes::of(&self.vm.vmi, given);
        let images = images.map_err(|lines| DataError::new("ErrImagePull", lines.join("; ")))?;
        let secret = |field: &str, name: &str| {
            let failed = |text: String| Failure::Runtime(format!("{field}.imagePullSecret: {text}"));
            let secret = self.secret(name).map_err(|error| failed(error.text))?;
            let config = secret.data.get(".dockerconfigjson");
            let config =
                config.ok_or_else(|| failed(format!("the Secret {name} has no .dockerconfigjson")))?;
            let config = String::from_utf8(config.clone());
            config
                .map(Some)
                .map_err(|_| failed(format!("the Secret {name} is not UTF-8")))
        };
        let pulled = images.pull_by(&secret, &mut |request| {
            let name = request.name.clone();
            let mut layers = Layers::default();
            import_program::pull_silently(request, &mut |event| {
                if let Some(text) = layers.text(event) {
                    report(&format!("pulling {name}: {text}"));
                }
            })
        });
        pulled.map_err(|failure| DataError::of("ErrImagePull", failure))
    }

    fn secret(&self, name: &str) -> Result<&Secret, DataError> {
        secret(self.objects, &self.vm.vmi.namespace, name)
    }

    fn config_map(&self, name: &str) -> Result<&ConfigMap, DataError> {
        config_map(self.objects, &self.vm.vmi.namespace, name)
    }

    fn value(&self, index: usize, path: &str) -> Option<&Value> {
        self.vm.manifest.pointer(&format!("/spec/volumes/{index}{path}"))
    }

    fn field(&self, index: usize, field: &str) -> String {
        format!("spec.volumes[{index}].{field}")
    }
}

/// A Secret of the store.
pub(super) fn secret<'a>(objects: &'a Objects, namespace: &str, name: &str) -> Result<&'a Secret, DataError> {
    let key = Key::new(Kind::Secret, namespace, name);
    let found = objects.find(&key, |kind| match kind {
        ObjectKind::Secret(secret) => Some(secret),
        _ => None,
    });
    found.ok_or_else(|| {
        DataError::new(
            "CrashLoopBackOff",
            format!("secret \"{name}\" not found: apply it"),
        )
    })
}

/// A ConfigMap of the store.
pub(super) fn config_map<'a>(
    objects: &'a Objects,
    namespace: &str,
    name: &str,
) -> Result<&'a ConfigMap, DataError> {
    let key = Key::new(Kind::ConfigMap, namespace, name);
    let found = objects.find(&key, |kind| match kind {
        ObjectKind::ConfigMap(map) => Some(map),
        _ => None,
    });
    found.ok_or_else(|| {
        DataError::new(
            "CrashLoopBackOff",
            format!("configmap \"{name}\" not found: apply it"),
        )
    })
}

fn bytes(secret: &Secret) -> impl Iterator<Item = (&str, &[u8])> {
    let data = secret.data.iter();
    data.map(|(key, value)| (key.as_str(), value.as_slice()))
}

/// The progress of a pull, as the sum of its layers.
#[derive(Debug, Default)]
struct Layers {
    layers: BTreeMap<String, (u64, u64)>,
}

impl Layers {
    /// The progress after an event, as text.
    fn text(&mut self, event: &Event) -> Option<String> {
        match event {
            Event::Layer { digest, done, size } => {
                self.layers.insert(digest.clone(), (*done, *size));
                let sum = |part: fn(&(u64, u64)) -> u64| {
                    self.layers.values().map(part).fold(0, u64::saturating_add)
                };
                Some(percent(sum(|layer| layer.0), Some(sum(|layer| layer.1))))
            }
            Event::Unpacking { done, size } => Some(format!("unpacking, {}", percent(*done, Some(*size)))),
            Event::Retrying { reason } => Some(format!("{reason}; trying again")),
            _ => None,
        }
    }
}

/// A share in per cent, or in MiB if the whole is not known.
pub(super) fn percent(done: u64, size: Option<u64>) -> String {
    match size {
        Some(size) if size > 0 => format!("{:.1} %", done.min(size) as f64 * 100.0 / size as f64),
        _ => format!("{} MiB", done >> 20),
    }
}

#[cfg(test)]
mod tests {
    use husk_vmi::Metadata;

    use super::*;

    #[test]
    fn a_key_that_a_seeds_secret_lacks_is_a_directory() {
        let home = tempfile::tempdir().unwrap();
        let files = ObjectFiles::new(home.path().join("files")).unwrap();
        let secret = Secret {
            metadata: Metadata::default(),
            secret_type: "Opaque".to_owned(),
            data: [("UserData".to_owned(), b"#cloud-config".to_vec())].into(),
            immutable: false,
        };
        let file = |wanted| seed_file(&files, wanted, wanted, &secret).unwrap();
        assert_eq!(std::fs::read(file("userdata")).unwrap(), b"#cloud-config");
        assert!(file("networkdata").is_dir());
    }

    #[test]
    fn progress_is_that_of_all_layers() {
        let mut layers = Layers::default();
        let layer = |digest: &str, done, size| Event::Layer {
            digest: digest.into(),
            done,
            size,
        };
        assert_eq!(layers.text(&layer("a", 50, 100)), Some("50.0 %".into()));
        assert_eq!(layers.text(&layer("b", 0, 100)), Some("25.0 %".into()));
        let unpacking = Event::Unpacking { done: 1, size: 3 };
        assert_eq!(layers.text(&unpacking), Some("unpacking, 33.3 %".into()));
        assert_eq!(percent(5 << 20, None), "5 MiB");
        assert_eq!(percent(u64::MAX, Some(1)), "100.0 %");
    }
}
