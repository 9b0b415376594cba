//! Deletes objects with what belongs to them. A deletion that was cut off is ended by the next command.

use std::time::Duration;

use husk_claims::ClaimError;
use husk_objects::{Key, Kind, ObjectError, StoredObject};

use super::systemd::Systemd;
use super::{FirstStart, LocalStores, data_volume, vm};
use crate::failure::{Failure, print_warning};
use crate::vm_ref::{DEFAULT_NAMESPACE, VmRef};

/// Interval of looking whether a VM has ended.
const LOOK: Duration = Duration::from_millis(200);

/// Deletes an object, and waits until nothing of it is left: a VM is shut down, and its DataVolumes go with it; the
/// claim of a DataVolume goes with that.
///
/// # Errors
/// A running VM uses the data, or the store cannot be written.
pub(crate) fn delete(stores: &LocalStores, systemd: Option<Systemd>, key: &Key) -> Result<(), Failure> {
    match stores.objects.get(key) {
        Ok(object) => {
            // Once the deletion has begun, later commands end it.
            check(stores, systemd, &object)?;
            end(stores, systemd, &stores.objects.begin_deletion(key)?)
        }
        Err(damaged @ ObjectError::Damaged { .. }) => {
            stop(systemd, key)?;
            FirstStart::of(stores, key).clear()?;
            let left = left_by_damaged(stores, key)?;
            stores.objects.remove(key)?;
            if let Some(left) = left {
                print_warning(&format!("{damaged}: {left}"));
            }
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Fails if an object cannot be deleted now.
fn check(stores: &LocalStores, systemd: Option<Systemd>, object: &StoredObject) -> Result<(), Failure> {
    let name = vm::name(&object.key);
    match object.key.kind {
        Kind::VirtualMachine | Kind::VirtualMachineInstance => reach(systemd).map(drop),
        Kind::DataVolume if data_volume::owns_claim(stores, object)? => {
            match stores.claims.get(&name.namespace, &name.name)?.in_use {
                true => Err(ClaimError::InUse(name.to_string()).into()),
                false => Ok(()),
            }
        }
        // Before it is marked: a VM that fills the volume uses it next, and a later command would delete its data.
        Kind::DataVolume => end_import(stores, systemd, &name),
        _ => Ok(()),
    }
}

/// Ends the import of a volume.
///
/// # Errors
/// A VM fills the volume.
fn end_import(stores: &LocalStores, systemd: Option<Systemd>, volume: &VmRef) -> Result<(), Failure> {
    if let Some(systemd) = systemd {
        systemd.stop_import(volume)?;
    }
    Ok(stores.claims.abandon_import(&volume.namespace, &volume.name)?)
}

/// The manager that may run VMs; none if systemd is not this machine's init.
///
/// # Errors
/// There is one that cannot be reached from here.
fn reach(systemd: Option<Systemd>) -> Result<Option<Systemd>, Failure> {
    match systemd {
        None if Systemd::is_init() => Systemd::find().map(Some),
        found => Ok(found),
    }
}

/// Ends the deletions that were begun, and removes what power cuts have left. Does not wait for VMs that shut down.
pub(crate) fn finish_deletions(stores: &LocalStores, systemd: Option<Systemd>) -> Result<(), Failure> {
    stores.objects.remove_leftovers()?;
    let objects = stores.objects.read()?;
    for object in objects.objects.iter().filter(|object| object.is_deleting()) {
        let key = &object.key;
        let ended = begin_stop(systemd, key).and_then(|systemd| match has_ended(systemd, key)? {
            true => end(stores, systemd, object),
            false => {
                eprintln!("{key} is being deleted");
                Ok(())
            }
        });
        if let Err(Failure::Runtime(text)) = ended {
            print_warning(&format!("{key}: its deletion is not complete: {text}"));
        }
    }
    remove_orphaned_imports(stores);
    Ok(())
}

fn end(stores: &LocalStores, systemd: Option<Systemd>, object: &StoredObject) -> Result<(), Failure> {
    match object.key.kind {
        Kind::VirtualMachine | Kind::VirtualMachineInstance => {
            stop(systemd, &object.key)?;
            FirstStart::of(stores, &object.key).clear()?;
            let volumes = stores.objects.read_kinds(|kind| kind == Kind::DataVolume)?;
            for owned in &volumes.objects {
                if owned.is_owned_by(object) && owned.key.namespace == object.key.namespace {
                    match delete(stores, systemd, &owned.key) {
                        // Another command was faster.
                        Err(_) if stores.is_gone(owned) => {}
                        deleted => deleted?,
                    }
                }
            }
            for left in damaged_volumes(stores, &object.key, &volumes.damaged) {
                print_warning(&left);
            }
            // A `husk start` that began before the deletion may have enabled it again.
            let name = vm::name(&object.key);
            if let Some(systemd) = systemd
                && systemd.vm(&name)?.enabled
            {
                systemd.enable(&name, false)?;
            }
        }
        Kind::DataVolume => {
            let name = vm::name(&object.key);
            end_import(stores, systemd, &name)?;
            if data_volume::owns_claim(stores, object)? {
                match stores.claims.remove(&name.namespace, &name.name) {
                    Ok(()) | Err(ClaimError::NotFound(_)) => {}
                    Err(error @ ClaimError::InUse(_)) => {
                        // Else a later command would delete what the VM has written until then.
                        stores.objects.cancel_deletion(&object.key)?;
                        return Err(error.into());
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        _ => {}
    }
    match stores.objects.remove(&object.key) {
        // Another command was faster.
        Ok(()) | Err(ObjectError::NotFound(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Names the data that stays when a damaged object is deleted, since its file cannot say what belongs to it, and the
/// command that deletes that data. None if there is no such data.
fn left_by_damaged(stores: &LocalStores, key: &Key) -> Result<Option<String>, Failure> {
    let namespace = &key.namespace;
    if key.kind == Kind::DataVolume && stores.claims.has(namespace, &key.name) {
        let command = delete_command("pvc", namespace, &[&key.name]);
        return Ok(Some(format!(
            "its claim stays, with its data: {command} deletes it"
        )));
    }
    if !key.kind.is_vm() {
        return Ok(None);
    }
    let volumes = stores.objects.read_kinds(|kind| kind == Kind::DataVolume)?;
    let owned = volumes
        .objects
        .iter()
        .filter(|volume| volume.key.namespace == *namespace && volume.names_owner(key));
    let names: Vec<&str> = owned.map(|volume| volume.key.name.as_str()).collect();
    if names.is_empty() {
        return Ok(None);
    }
    let command = delete_command("dv", namespace, &names);
    Ok(Some(format!(
        "its DataVolumes stay, with their data: {command} deletes them"
    )))
}

/// A line for each damaged DataVolume in the namespace of a VM that is deleted: it may be one of the VM's, and stays.
fn damaged_volumes(stores: &LocalStores, vm: &Key, damaged: &[ObjectError]) -> Vec<String> {
    let of_namespace = stores
        .objects
        .file(&Key::new(Kind::DataVolume, &vm.namespace, ""));
    let lines = damaged.iter().filter_map(|error| {
        let (ObjectError::Damaged { path, .. } | ObjectError::Io { path, .. }) = error else {
            return None;
        };
        let name = path.file_stem()?.to_str()?;
        let command = delete_command("dv", &vm.namespace, &[name]);
        (path.parent() == of_namespace.parent()).then(|| {
            format!(
                "{error}: if this DataVolume is of {vm}, it stays, with its data: correct the file, then {command} \
                 deletes both"
            )
        })
    });
    lines.collect()
}

/// The command that deletes objects of a kind, as Markdown.
pub(crate) fn delete_command(kind: &str, namespace: &str, names: &[&str]) -> String {
    let namespace = match namespace {
        DEFAULT_NAMESPACE => String::new(),
        other => format!(" -n {other}"),
    };
    format!("`husk delete {kind} {}{namespace}`", names.join(" "))
}

/// Shuts a VM down, so that it does not start again, and waits for its end.
fn stop(systemd: Option<Systemd>, key: &Key) -> Result<(), Failure> {
    let systemd = begin_stop(systemd, key)?;
    while !has_ended(systemd, key)? {
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Begins to shut a VM down, so that it does not start again. Returns the manager, if there is one.
fn begin_stop(systemd: Option<Systemd>, key: &Key) -> Result<Option<Systemd>, Failure> {
    if !key.kind.is_vm() {
        return Ok(systemd);
    }
    let systemd = reach(systemd)?;
    if let Some(systemd) = systemd {
        let name = vm::name(key);
        systemd.stop_for_good(&name, &systemd.vm(&name)?)?;
    }
    Ok(systemd)
}

/// True if a VM that was stopped has ended. Other objects have.
fn has_ended(systemd: Option<Systemd>, key: &Key) -> Result<bool, Failure> {
    let Some(systemd) = systemd.filter(|_| key.kind.is_vm()) else {
        return Ok(true);
    };
    let name = vm::name(key);
    let unit = systemd.vm(&name)?;
    let ended = !unit.runs() && !unit.is_stopping();
    if ended {
        systemd.forget(&name);
    }
    Ok(ended)
}

/// Removes what imports have left whose DataVolumes are gone.
fn remove_orphaned_imports(stores: &LocalStores) {
    for (namespace, name) in stores.claims.imports() {
        // A damaged one is not gone.
        let found = stores.objects.get(&Key::new(Kind::DataVolume, &namespace, &name));
        if matches!(found, Err(ObjectError::NotFound(_))) {
            // It fails while a process fills the volume.
            let _ = stores.claims.abandon_import(&namespace, &name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;
    use crate::machine::fake_systemd::FakeSystemd;
    use crate::machine::test_manifests;

    fn stores() -> (tempfile::TempDir, LocalStores) {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        (folder, stores)
    }

    fn data_volume(name: &str, namespace: &str, owner: &str) -> Value {
        json!({
            "apiVersion": "cdi.kubevirt.io/v1beta1",
            "kind": "DataVolume",
            "metadata": {
                "name": name,
                "namespace": namespace,
                "ownerReferences": [{"kind": "VirtualMachine", "name": owner, "uid": "1"}],
            },
            "spec": {"source": {"blank": {}}, "storage": {"resources": {"requests": {"storage": "1Mi"}}}},
        })
    }

    #[test]
    fn a_volume_that_a_vm_fills_is_not_marked_as_deleted() {
        let (_folder, stores) = stores();
        let manifest = data_volume("root", "test", "demo");
        let key = stores.objects.apply(&manifest).unwrap().object.key;
        let import = stores.claims.begin_import("test", "root").unwrap();
        let Err(Failure::Runtime(text)) = delete(&stores, None, &key) else {
            panic!("it was deleted")
        };
        assert!(text.contains("a running VM uses the volume"), "{text}");
        assert!(!stores.objects.get(&key).unwrap().is_deleting());
        drop(import);
        delete(&stores, None, &key).unwrap();
        assert!(stores.objects.get(&key).is_err() && stores.claims.imports().is_empty());
    }

    #[test]
    fn the_import_of_a_damaged_volume_is_kept() {
        let (_folder, stores) = stores();
        let manifest = data_volume("root", "test", "demo");
        let key = stores.objects.apply(&manifest).unwrap().object.key;
        drop(stores.claims.begin_import("test", "root").unwrap());
        fs::write(stores.objects.file(&key), "kind:").unwrap();
        finish_deletions(&stores, None).unwrap();
        assert_eq!(stores.claims.imports().len(), 1);
        stores.objects.remove(&key).unwrap();
        finish_deletions(&stores, None).unwrap();
        assert!(stores.claims.imports().is_empty());
    }

    #[test]
    fn only_the_deletion_of_a_vm_waits_for_its_end() {
        let (_folder, stores) = stores();
        let keys = ["runs", "stops", "ended"].map(|name| {
            let vm = json!({
                "apiVersion": "kubevirt.io/v1",
                "kind": "VirtualMachineInstance",
                "metadata": {"name": name},
                "spec": {"domain": {"devices": {}}},
            });
            let key = stores.objects.apply(&vm).unwrap().object.key;
            stores.objects.begin_deletion(&key).unwrap();
            key
        });
        let states = ["active", "deactivating", "inactive"];
        let units = keys
            .iter()
            .map(|key| Systemd::vm_unit(&vm::name(key)))
            .zip(states);
        let systemd = FakeSystemd {
            units: units.collect(),
            ..FakeSystemd::default()
        }
        .install();
        finish_deletions(&stores, Some(systemd)).unwrap();
        assert_eq!(
            keys.map(|key| stores.objects.get(&key).is_ok()),
            [true, true, false]
        );
        let changes = FakeSystemd::changes();
        for change in [
            "disable husk@default:runs.service",
            "stop husk@default:runs.service",
        ] {
            assert!(changes.iter().any(|made| made == change), "{changes:?}");
        }
    }

    #[test]
    fn a_vm_that_was_enabled_meanwhile_leaves_no_enabled_unit() {
        let (_folder, stores) = stores();
        let vmi = test_manifests::vmi("demo");
        let key = stores.objects.apply(&vmi).unwrap().object.key;
        let systemd = FakeSystemd {
            units: [("husk@default:demo.service".to_owned(), "inactive")].into(),
            stay_enabled: true,
            ..FakeSystemd::default()
        }
        .install();
        delete(&stores, Some(systemd), &key).unwrap();
        let changes = ["disable", "stop", "disable"].map(|verb| format!("{verb} husk@default:demo.service"));
        assert_eq!(FakeSystemd::changes(), changes);
    }

    #[test]
    fn a_vm_of_a_machine_without_the_unit_file_is_deleted() {
        let (_folder, stores) = stores();
        let vm = test_manifests::vm("demo", "Always");
        let key = stores.objects.apply(&vm).unwrap().object.key;
        let systemd = FakeSystemd {
            lacks_unit_file: true,
            ..FakeSystemd::default()
        }
        .install();
        delete(&stores, Some(systemd), &key).unwrap();
        assert!(stores.objects.get(&key).is_err());
        assert_eq!(FakeSystemd::changes(), [""; 0]);
    }

    #[test]
    fn a_vm_is_deleted_with_its_volume_on_a_full_disk() {
        let (_folder, stores) = stores();
        let vm = stores
            .objects
            .apply(&test_manifests::vm("demo", "Always"))
            .unwrap();
        let mut volume = data_volume("root", "default", "demo");
        volume["metadata"]["ownerReferences"][0]["uid"] = vm.object.uid().into();
        let volume = stores.objects.apply(&volume).unwrap().object;
        let (name, objects) = (vm::name(&volume.key), stores.objects.read().unwrap());
        data_volume::import(&stores, &objects, &name, &mut |_| {}).unwrap();
        // No new file can be written.
        for (key, new) in [(&vm.object.key, ".demo.new"), (&volume.key, ".root.new")] {
            fs::create_dir(stores.objects.file(key).with_file_name(new)).unwrap();
        }
        let systemd = FakeSystemd {
            lacks_unit_file: true,
            ..FakeSystemd::default()
        }
        .install();
        delete(&stores, Some(systemd), &vm.object.key).unwrap();
        assert!(stores.objects.read().unwrap().objects.is_empty());
        assert!(!stores.claims.has("default", "root"));
    }

    #[test]
    fn volumes_of_a_damaged_vm_are_named() {
        let (_folder, stores) = stores();
        let vm = Key::new(Kind::VirtualMachine, "test", "demo");
        assert_eq!(left_by_damaged(&stores, &vm).unwrap(), None);
        for (name, namespace, owner) in [
            ("root", "test", "demo"),
            ("data", "test", "demo"),
            ("other", "test", "other"),
            ("root", "default", "demo"),
        ] {
            stores
                .objects
                .apply(&data_volume(name, namespace, owner))
                .unwrap();
        }
        assert_eq!(
            left_by_damaged(&stores, &vm).unwrap().unwrap(),
            "its DataVolumes stay, with their data: `husk delete dv data root -n test` deletes them"
        );
        let secret = Key::new(Kind::Secret, "test", "demo");
        assert_eq!(left_by_damaged(&stores, &secret).unwrap(), None);
    }

    #[test]
    fn a_volume_with_a_damaged_claim_stays() {
        let (_folder, stores) = stores();
        let vm = stores
            .objects
            .apply(&test_manifests::vm("demo", "Always"))
            .unwrap();
        let mut manifest = data_volume("root", "default", "demo");
        manifest["metadata"]["ownerReferences"][0]["uid"] = vm.object.uid().into();
        let key = stores.objects.apply(&manifest).unwrap().object.key;
        let (name, objects) = (vm::name(&key), stores.objects.read().unwrap());
        data_volume::import(&stores, &objects, &name, &mut |_| {}).unwrap();
        let file = stores
            .claims
            .image("default", "root")
            .with_file_name("claim.yaml");
        let systemd = || {
            FakeSystemd {
                lacks_unit_file: true,
                ..FakeSystemd::default()
            }
            .install()
        };
        for damage in [Some("kind:"), None] {
            match damage {
                Some(text) => fs::write(&file, text).unwrap(),
                None => fs::remove_file(&file).unwrap(),
            }
            for key in [&key, &vm.object.key] {
                let Err(Failure::Runtime(text)) = delete(&stores, Some(systemd()), key) else {
                    panic!("it was deleted")
                };
                assert!(text.contains("root may be of this DataVolume: "), "{text}");
                assert!(text.ends_with(" by `husk delete pvc root`"), "{text}");
            }
            assert!(!stores.objects.get(&key).unwrap().is_deleting());
        }
        stores.claims.remove("default", "root").unwrap();
        delete(&stores, Some(systemd()), &vm.object.key).unwrap();
        assert!(stores.objects.read().unwrap().objects.is_empty());
    }

    #[test]
    fn damaged_volumes_in_the_namespace_of_a_vm_are_named() {
        let (_folder, stores) = stores();
        for namespace in ["default", "test"] {
            let file = stores
                .objects
                .file(&Key::new(Kind::DataVolume, namespace, "root"));
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "kind:").unwrap();
        }
        let damaged = stores.objects.read().unwrap().damaged;
        let vm = Key::new(Kind::VirtualMachine, "default", "demo");
        let lines = damaged_volumes(&stores, &vm, &damaged);
        let [line] = &lines[..] else { panic!("{lines:?}") };
        let file = stores
            .objects
            .file(&Key::new(Kind::DataVolume, "default", "root"));
        assert!(line.starts_with(&format!("{}: ", file.display())), "{line}");
        assert!(
            line.ends_with("then `husk delete dv root` deletes both"),
            "{line}"
        );
    }
}
