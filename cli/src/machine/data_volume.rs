//! DataVolumes: the claim of a DataVolume, filled from its source.

use std::cell::RefCell;

use husk_claims::{ClaimError, Import, NewClaim};
use husk_images::{
    Checksum, ChecksumAlgorithm, Event, HttpSource, Login, RegistrySource, VolumeRequest, VolumeSource,
};
use husk_objects::{Key, Kind, Objects, StoredObject};
use husk_vmi::objects::{self, DataVolume, DataVolumeSource, ObjectKind};

use super::data::{DataError, Report, config_map, percent, secret};
use super::systemd::Units;
use super::vm;
use super::{LocalStores, delete_command};
use crate::failure::{Failure, chain};
use crate::import_program;
use crate::vm_ref::VmRef;

/// Annotation of a claim with the UID of the DataVolume that made it, as CDI has it.
const MADE_FOR: &str = "cdi.kubevirt.io/createdForDataVolume";
const STATUS: &str = "DataVolumeError";
/// DataVolumes that copy each other's claims, one after the other.
const MAX_DEPTH: usize = 16;

/// Phase of a DataVolume, as `husk get dv` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DataVolumePhase {
    /// CDI's name, or `Terminating`.
    pub phase: &'static str,
    /// Such as `45.3%`, or `N/A`.
    pub progress: String,
    /// The error of an import, or its progress as text.
    pub message: String,
}

/// Makes the claim of a DataVolume and fills it, or waits for another process that does.
///
/// # Errors
/// The DataVolume is not in the store, or its source cannot be read.
pub(crate) fn import(
    stores: &LocalStores,
    objects: &Objects,
    volume: &VmRef,
    report: &mut Report<'_>,
) -> Result<(), DataError> {
    import_at(stores, objects, volume, report, 0)
}

fn import_at(
    stores: &LocalStores,
    objects: &Objects,
    volume: &VmRef,
    report: &mut Report<'_>,
    depth: usize,
) -> Result<(), DataError> {
    let (namespace, name) = (volume.namespace.as_str(), volume.name.as_str());
    let failed = |text: String| DataError::new(STATUS, format!("DataVolume {volume}: {text}"));
    if stores.claims.has(namespace, name) {
        return Ok(());
    }
    let stored = objects.get(&Key::new(Kind::DataVolume, namespace, name));
    let Some((stored, data)) = stored.and_then(|stored| Some((stored, data_volume(stored)?))) else {
        return Err(failed("it is not in the store: apply it".into()));
    };
    if depth > MAX_DEPTH {
        return Err(failed("its source is a copy of itself".into()));
    }
    let done = match &data.source {
        DataVolumeSource::Blank => stores.claims.create(&claim(stored, data, 0)),
        DataVolumeSource::Pvc { namespace, name } => {
            let source = VmRef {
                namespace: namespace.clone(),
                name: name.clone(),
            };
            let has_object = objects
                .get(&Key::new(Kind::DataVolume, namespace, name))
                .is_some();
            if !stores.claims.has(namespace, name) && has_object {
                import_at(stores, objects, &source, report, depth + 1)?;
            }
            let size = stores
                .claims
                .get(namespace, name)
                .map_err(|error| failed(error.to_string()))?
                .size;
            let report = RefCell::new(report);
            stores
                .claims
                .copy((namespace, name), &claim(stored, data, size), &|done, size| {
                    let text = percent(done, Some(size));
                    (report.borrow_mut())(&format!("copying {source} to {volume}: {text}"));
                })
        }
        DataVolumeSource::Http(source) => {
            let source = http(objects, namespace, source).map_err(|error| failed(error.text))?;
            return fill(stores, volume, stored, data, VolumeSource::Http(source), report);
        }
        DataVolumeSource::Registry(source) => {
            let source = registry(objects, namespace, source).map_err(|error| failed(error.text))?;
            return fill(
                stores,
                volume,
                stored,
                data,
                VolumeSource::Registry(source),
                report,
            );
        }
    };
    match done {
        // Another process was faster.
        Ok(()) | Err(ClaimError::Exists(_)) => keep(stores, volume, stored),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Keeps the claim that was made for a DataVolume. It is removed if the DataVolume was deleted meanwhile: a deletion that
/// began before has not seen it, and a later one would remove the data that a VM has written.
fn keep(stores: &LocalStores, volume: &VmRef, stored: &StoredObject) -> Result<(), DataError> {
    if !stores.is_gone(stored) {
        return Ok(());
    }
    if owns_claim(stores, stored).is_ok_and(|owns| owns) {
        // It fails if a VM uses it.
        let _ = stores.claims.remove(&volume.namespace, &volume.name);
    }
    Err(deleted(volume))
}

fn deleted(volume: &VmRef) -> DataError {
    DataError::new(STATUS, format!("DataVolume {volume}: it is being deleted"))
}

/// Refuses a claim whose DataVolume is being deleted, for a VM that is to use it: a later command completes the
/// deletion, and would remove what the VM has written.
pub(crate) fn refuse_deleted(stores: &LocalStores, claim: &VmRef) -> Result<(), DataError> {
    let key = Key::new(Kind::DataVolume, &claim.namespace, &claim.name);
    if !stores.objects.get(&key).is_ok_and(|stored| stored.is_deleting()) {
        return Ok(());
    }
    let command = delete_command("dv", &claim.namespace, &[&claim.name]);
    let text = format!(
        "{}: {command} ends that, then apply it again",
        deleted(claim).text
    );
    Err(DataError::new(STATUS, text))
}

/// Fills a volume by `husk-import`.
fn fill(
    stores: &LocalStores,
    volume: &VmRef,
    stored: &StoredObject,
    data: &DataVolume,
    source: VolumeSource,
    report: &mut Report<'_>,
) -> Result<(), DataError> {
    let failed = |text: String| DataError::new(STATUS, format!("DataVolume {volume}: {text}"));
    report(&format!("importing {volume}: waiting for another process"));
    let import = match stores.claims.begin_import(&volume.namespace, &volume.name) {
        Err(ClaimError::Exists(_)) => return Ok(()),
        other => other.map_err(|error| failed(error.to_string()))?,
    };
    // Another process may have held it for long.
    let import = if_current(stores, volume, stored, import)?;
    let request = VolumeRequest {
        directory: import.directory().to_owned(),
        source,
        size: data.claim.size,
    };
    import_program::fill(request, &mut |event| {
        if let Some(text) = progress(event) {
            report(&format!("importing {volume}: {text}"));
        }
    })
    .map_err(|failure| failed(DataError::of(STATUS, failure).text))?;
    let finished = if_current(stores, volume, stored, import)?.finish(&claim(stored, data, 0));
    if matches!(finished, Err(ClaimError::Exists(_))) {
        // Somebody has created the claim meanwhile: nothing would remove what was downloaded.
        let _ = stores.claims.abandon_import(&volume.namespace, &volume.name);
    }
    finished.map_err(|error| failed(error.to_string()))?;
    keep(stores, volume, stored)
}

/// Returns `import`, or abandons it if the DataVolume was deleted or changed since it was read.
fn if_current(
    stores: &LocalStores,
    volume: &VmRef,
    stored: &StoredObject,
    import: Import,
) -> Result<Import, DataError> {
    let now = stores.objects.get(&stored.key);
    let error = if stores.is_gone(stored) {
        deleted(volume)
    } else if now.is_ok_and(|now| now.value()["spec"] != stored.value()["spec"]) {
        let text = format!("DataVolume {volume}: it was changed while it was being imported: apply it again");
        DataError::new(STATUS, text)
    } else {
        return Ok(import);
    };
    let _ = import.abandon();
    Err(error)
}

fn progress(event: &Event) -> Option<String> {
    match event {
        Event::Download { done, size } => Some(percent(*done, *size)),
        Event::Layer { done, size, .. } => Some(percent(*done, Some(*size))),
        Event::Converting { done, size } | Event::Unpacking { done, size } => {
            Some(format!("converting, {}", percent(*done, Some(*size))))
        }
        Event::Retrying { reason } => Some(format!("{reason}; trying again")),
        Event::Done { .. } | Event::Filled { .. } | Event::Failed { .. } => None,
    }
}

/// The claim of a DataVolume. `size` is used if the DataVolume has none.
fn claim(stored: &StoredObject, data: &DataVolume, size: u64) -> NewClaim {
    let mut claim = NewClaim::of(&data.metadata, &data.claim, size);
    claim.annotations.clear();
    claim
        .annotations
        .insert(MADE_FOR.to_owned(), stored.uid().to_owned());
    claim
}

/// The DataVolume of a stored object.
pub(crate) fn data_volume(stored: &StoredObject) -> Option<&DataVolume> {
    match &stored.object.kind {
        ObjectKind::DataVolume(data) => Some(data),
        _ => None,
    }
}

/// True if the DataVolume made its claim, which goes with it.
///
/// # Errors
/// The claim cannot be read: it may be the DataVolume's.
pub(super) fn owns_claim(stores: &LocalStores, stored: &StoredObject) -> Result<bool, Failure> {
    let Key { namespace, name, .. } = &stored.key;
    let text = match stores.claims.get(namespace, name) {
        Ok(claim) => {
            let made_for = claim.object.metadata.annotations.get(MADE_FOR);
            return Ok(made_for.map(String::as_str) == Some(stored.uid()));
        }
        Err(ClaimError::NotFound(_)) if !stores.claims.has(namespace, name) => return Ok(false),
        Err(ClaimError::NotFound(_)) => "it lacks a file".to_owned(),
        Err(error) => chain(&error),
    };
    let command = delete_command("pvc", namespace, &[name]);
    Err(Failure::Runtime(format!(
        "the claim {} may be of this DataVolume: {text}: correct the file, or delete the claim with its data by \
         {command}",
        vm::name(&stored.key)
    )))
}

fn http(objects: &Objects, namespace: &str, source: &objects::HttpSource) -> Result<HttpSource, DataError> {
    let mut headers = source.extra_headers.clone();
    for name in &source.secret_extra_headers {
        for value in secret(objects, namespace, name)?.data.values() {
            let header = std::str::from_utf8(value)
                .ok()
                .and_then(|text| text.trim().split_once(':'));
            let (name, value) = header.ok_or_else(|| {
                DataError::new(STATUS, format!("the Secret {name} must have lines 'NAME: VALUE'"))
            })?;
            headers.push((name.trim().to_owned(), value.trim().to_owned()));
        }
    }
    Ok(HttpSource {
        url: source.url.clone(),
        checksum: source.checksum.as_ref().map(|checksum| Checksum {
            algorithm: match checksum.algorithm {
                objects::ChecksumAlgorithm::Md5 => ChecksumAlgorithm::Md5,
                objects::ChecksumAlgorithm::Sha1 => ChecksumAlgorithm::Sha1,
                objects::ChecksumAlgorithm::Sha256 => ChecksumAlgorithm::Sha256,
                objects::ChecksumAlgorithm::Sha512 => ChecksumAlgorithm::Sha512,
            },
            digest: checksum.digest.clone(),
        }),
        certificates: certificates(objects, namespace, source.cert_config_map.as_deref())?,
        login: login(objects, namespace, source.secret_ref.as_deref())?,
        headers,
    })
}

fn registry(
    objects: &Objects,
    namespace: &str,
    source: &objects::RegistrySource,
) -> Result<RegistrySource, DataError> {
    Ok(RegistrySource {
        image: source.image.clone(),
        pull_secret: None,
        login: login(objects, namespace, source.secret_ref.as_deref())?,
        certificates: certificates(objects, namespace, source.cert_config_map.as_deref())?,
    })
}

fn certificates(objects: &Objects, namespace: &str, name: Option<&str>) -> Result<Vec<String>, DataError> {
    let Some(name) = name else {
        return Ok(Vec::new());
    };
    let map = config_map(objects, namespace, name)?;
    let files = map
        .files()
        .map(|(_, content)| String::from_utf8_lossy(content).into_owned());
    Ok(files.collect())
}

fn login(objects: &Objects, namespace: &str, name: Option<&str>) -> Result<Option<Login>, DataError> {
    let Some(name) = name else {
        return Ok(None);
    };
    let found = secret(objects, namespace, name)?;
    let text = |key: &str| {
        let value = found
            .data
            .get(key)
            .and_then(|value| String::from_utf8(value.clone()).ok());
        value.ok_or_else(|| DataError::new(STATUS, format!("the Secret {name} has no text {key}")))
    };
    Ok(Some(Login {
        user: text("accessKeyId")?,
        password: text("secretKey")?,
    }))
}

/// The phase of a DataVolume, from its claim and from what fills it.
pub(crate) fn phase(stores: &LocalStores, units: &Units, stored: &StoredObject) -> DataVolumePhase {
    let name = vm::name(&stored.key);
    let phase = |phase, progress: &str, message: String| DataVolumePhase {
        phase,
        progress: progress.to_owned(),
        message,
    };
    if stored.is_deleting() {
        return phase("Terminating", "N/A", "it is being deleted".to_owned());
    }
    if stores.claims.has(&name.namespace, &name.name) {
        return phase("Succeeded", "100.0%", String::new());
    }
    let unit = units.imports.get(&name);
    // The process of a VM fills its volumes itself if nothing else does.
    let prefix = format!("importing {name}: ");
    let mut texts = unit
        .into_iter()
        .chain(units.vms.values())
        .filter(|unit| unit.runs());
    let copied = format!(" to {name}: ");
    let text = texts.find_map(|unit| {
        let of_copy = || unit.text.split_once("copying ")?.1.split_once(&copied);
        Some(unit.text.split_once(&prefix).or_else(of_copy)?.1)
    });
    if let Some(text) = text {
        let share = text
            .strip_suffix(" %")
            .map(|share| format!("{}%", share.trim_start_matches("converting, ")));
        return phase(
            "ImportInProgress",
            share.as_deref().unwrap_or("N/A"),
            text.to_owned(),
        );
    }
    if stores.claims.is_importing(&name.namespace, &name.name) {
        return phase("ImportInProgress", "N/A", String::new());
    }
    match unit {
        Some(unit) if unit.active == "failed" => phase("Failed", "N/A", unit.text.clone()),
        _ => phase("Pending", "N/A", String::new()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::machine::object_files::ObjectFiles;
    use crate::machine::systemd::Unit;
    use crate::machine::{Data, store_templates, test_manifests};

    #[test]
    fn a_volume_that_is_deleted_while_it_is_filled_leaves_no_claim() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        stores
            .claims
            .create(&NewClaim::new("default", "source", 1 << 20))
            .unwrap();
        for source in [
            json!({"blank": {}}),
            json!({"pvc": {"namespace": "default", "name": "source"}}),
            json!({"http": {"url": "http://127.0.0.1:1/disk.img"}}),
        ] {
            let manifest = test_manifests::data_volume("data", &source);
            let key = stores.objects.apply(&manifest).unwrap().object.key;
            let objects = stores.objects.read().unwrap();
            let import = || {
                let error = import(&stores, &objects, &vm::name(&key), &mut |_| {}).unwrap_err();
                assert_eq!(error.text, "DataVolume data: it is being deleted", "{source}");
                assert!(!stores.claims.has("default", "data"), "{source}");
                assert!(stores.claims.imports().is_empty(), "{source}");
            };
            stores.objects.begin_deletion(&key).unwrap();
            import();
            stores.objects.remove(&key).unwrap();
            import();
            stores.objects.apply(&manifest).unwrap();
            import();
            stores.objects.remove(&key).unwrap();
        }
    }

    #[test]
    fn no_vm_uses_the_claim_of_a_volume_that_is_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let vm = stores
            .objects
            .apply(&test_manifests::vm_with_template())
            .unwrap()
            .object;
        let expanded = vm::expanded(&vm.object, &[]).unwrap();
        store_templates(&stores, &vm, None, &expanded).unwrap();
        let key = Key::new(Kind::DataVolume, "default", "demo-root");
        let name = vm::name(&key);
        import(&stores, &stores.objects.read().unwrap(), &name, &mut |_| {}).unwrap();
        let provided = || {
            let objects = stores.objects.read().unwrap();
            let files = ObjectFiles::new(folder.path().join("files")).unwrap();
            let provided = Data::provide(&stores, &objects, &expanded, &files, &mut |_| {});
            provided.map(|data| data.volumes.len())
        };
        let phase = || {
            let stored = stores.objects.get(&key).unwrap();
            phase(&stores, &Units::default(), &stored).phase
        };
        assert_eq!((provided().unwrap(), phase()), (1, "Succeeded"));
        stores.objects.begin_deletion(&key).unwrap();
        let error = provided().unwrap_err();
        assert_eq!(
            (error.status, error.text.as_str(), phase()),
            (
                STATUS,
                "DataVolume demo-root: it is being deleted: `husk delete dv demo-root` ends that, then apply it again",
                "Terminating"
            )
        );
    }

    #[test]
    fn an_import_and_a_copy_show_their_progress() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let manifest = test_manifests::data_volume("data", &json!({"blank": {}}));
        let stored = stores.objects.apply(&manifest).unwrap().object;
        let volume = vm::name(&stored.key);
        let source: VmRef = "default/source".parse().unwrap();
        let shown = |text: String| {
            let unit = Unit {
                active: "active".to_owned(),
                text,
                ..Unit::default()
            };
            let units = Units {
                imports: [(volume.clone(), unit)].into(),
                ..Units::default()
            };
            let phase = phase(&stores, &units, &stored);
            (phase.phase, phase.progress)
        };
        let half = ("ImportInProgress", "50.0%".to_owned());
        assert_eq!(shown(format!("importing {volume}: 50.0 %")), half);
        assert_eq!(shown(format!("copying {source} to {volume}: 50.0 %")), half);
        for other in [
            format!("importing {source}: 50.0 %"),
            format!("copying {volume} to {source}: 50.0 %"),
        ] {
            assert_eq!(shown(other).0, "Pending");
        }
    }

    #[test]
    fn a_volume_that_is_changed_while_it_is_filled_leaves_no_claim() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let apply = |file: &str| {
            let source = json!({"http": {"url": format!("http://127.0.0.1:1/{file}")}});
            stores
                .objects
                .apply(&test_manifests::data_volume("data", &source))
                .unwrap()
                .object
        };
        let stored = apply("old.img");
        let name = vm::name(&stored.key);
        let objects = stores.objects.read().unwrap();
        let begin = || stores.claims.begin_import("default", "data").unwrap();
        drop(if_current(&stores, &name, &stored, begin()).unwrap());
        apply("new.img");
        let changed = "DataVolume data: it was changed while it was being imported: apply it again";
        let error = import(&stores, &objects, &name, &mut |_| {}).unwrap_err();
        assert_eq!(error.text, changed);
        let error = if_current(&stores, &name, &stored, begin()).unwrap_err();
        assert_eq!(error.text, changed);
        assert!(!stores.claims.has("default", "data"));
        assert!(stores.claims.imports().is_empty());
    }

    #[test]
    fn the_claim_of_another_volume_stays() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let manifest = test_manifests::data_volume("data", &json!({"blank": {}}));
        let old = stores.objects.apply(&manifest).unwrap().object;
        stores.objects.remove(&old.key).unwrap();
        stores.objects.apply(&manifest).unwrap();
        let name = vm::name(&old.key);
        import(&stores, &stores.objects.read().unwrap(), &name, &mut |_| {}).unwrap();
        keep(&stores, &name, &old).unwrap_err();
        assert!(stores.claims.has("default", "data"));
    }
}
