//! The DataVolumes that VMs get from their `dataVolumeTemplates`.

use husk_objects::{Applied, Key, Kind, ObjectError, Outcome, StoredObject};
use serde_json::{Value, json};

use super::LocalStores;
use super::vm::ExpandedVm;
use crate::failure::{Failure, chain};

/// Stores the `dataVolumeTemplates` of a VM as its DataVolumes, unless there are objects of their names or the VM was
/// deleted meanwhile. `before` is the VM's object before it was changed: a DataVolume without a claim follows a template
/// that differs from it.
///
/// # Errors
/// The store cannot be written, or the file of a DataVolume without a claim is damaged.
pub(crate) fn store_templates(
    stores: &LocalStores,
    owner: &StoredObject,
    before: Option<&Value>,
    vm: &ExpandedVm,
) -> Result<Vec<Applied>, Failure> {
    let mut all = Vec::new();
    for (data, template) in vm.data_volumes.iter().zip(templates(owner.value())) {
        let key = Key::new(Kind::DataVolume, &owner.key.namespace, &data.metadata.name);
        match stores.objects.get(&key) {
            Ok(object)
                if object.is_owned_by(owner)
                    && !stores.claims.has(&key.namespace, &key.name)
                    && before.is_some_and(|before| has_changed(template, before)) => {}
            Ok(object) => {
                all.push(Applied {
                    outcome: Outcome::Unchanged,
                    object,
                    before: None,
                });
                continue;
            }
            Err(ObjectError::NotFound(_)) => {}
            // A person has broken the file, and can correct it. The claim that the VM needs is there.
            Err(_) if stores.claims.has(&key.namespace, &key.name) => continue,
            Err(error) => {
                return Err(Failure::Runtime(format!(
                    "{}: correct the file, or `husk delete dv {}`",
                    chain(&error),
                    key.name
                )));
            }
        }
        // Nothing would delete the DataVolumes of a VM that is gone.
        if stores.is_gone(owner) {
            break;
        }
        let mut metadata = template["metadata"].clone();
        metadata["namespace"] = json!(owner.key.namespace);
        metadata["ownerReferences"] = json!([{
            "apiVersion": "kubevirt.io/v1",
            "kind": owner.key.kind.name(),
            "name": owner.key.name,
            "uid": owner.uid(),
            "controller": true,
        }]);
        all.push(stores.objects.apply(&json!({
            "apiVersion": "cdi.kubevirt.io/v1beta1",
            "kind": "DataVolume",
            "metadata": metadata,
            "spec": template["spec"],
        }))?);
    }
    Ok(all)
}

fn templates(vm: &Value) -> impl Iterator<Item = &Value> {
    let templates = vm.pointer("/spec/dataVolumeTemplates").and_then(Value::as_array);
    templates.into_iter().flatten()
}

/// True if the VM's template of this name had another spec before.
fn has_changed(template: &Value, before: &Value) -> bool {
    let old = templates(before).find(|old| old["metadata"]["name"] == template["metadata"]["name"]);
    old.is_some_and(|old| old["spec"] != template["spec"])
}

#[cfg(test)]
mod tests {
    use husk_claims::NewClaim;

    use super::*;
    use crate::machine::{test_manifests, vm};

    #[test]
    fn a_volume_that_its_user_broke_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let owner = stores
            .objects
            .apply(&test_manifests::vm_with_template())
            .unwrap()
            .object;
        let expanded = vm::expanded(&owner.object, &[]).unwrap();
        let stored = || store_templates(&stores, &owner, None, &expanded);
        let [applied] = &stored().unwrap()[..] else {
            panic!("no DataVolume")
        };
        let file = stores.objects.file(&applied.object.key);
        std::fs::write(&file, "kind:").unwrap();
        let Err(Failure::Runtime(text)) = stored() else {
            panic!("it was stored")
        };
        assert!(text.starts_with(&format!("{}: ", file.display())), "{text}");
        stores
            .claims
            .create(&NewClaim::new("default", "demo-root", 1 << 20))
            .unwrap();
        assert!(stored().unwrap().is_empty());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "kind:");
    }

    #[test]
    fn a_volume_without_a_claim_follows_its_template() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let mut manifest = test_manifests::vm_with_template();
        let apply = |manifest: &Value| {
            let vm = stores.objects.apply(manifest).unwrap();
            let expanded = vm::expanded(&vm.object.object, &[]).unwrap();
            let before = vm.before.as_ref();
            let [stored] = &store_templates(&stores, &vm.object, before, &expanded).unwrap()[..] else {
                panic!("no DataVolume")
            };
            (stored.outcome, stored.object.value()["spec"].clone())
        };
        assert_eq!(apply(&manifest).0, Outcome::Created);
        let template = "/spec/dataVolumeTemplates/0/spec";
        manifest.pointer_mut(template).unwrap()["source"] = json!({"http": {"url": "http://host/corrected"}});
        let corrected = manifest.pointer(template).unwrap().clone();
        assert_eq!(apply(&manifest), (Outcome::Configured, corrected.clone()));
        // The user corrects the volume itself.
        let key = Key::new(Kind::DataVolume, "default", "demo-root");
        let edited = stores.objects.edit(&key, |volume| {
            volume["spec"]["source"] = json!({"blank": {}});
        });
        edited.unwrap();
        manifest["metadata"]["labels"] = json!({"a": "b"});
        assert_eq!(apply(&manifest).0, Outcome::Unchanged);
        let new = NewClaim::new("default", "demo-root", 1 << 20);
        stores.claims.create(&new).unwrap();
        manifest.pointer_mut(template).unwrap()["source"] = json!({"blank": {}});
        assert_eq!(apply(&manifest).0, Outcome::Unchanged);
    }

    #[test]
    fn a_vm_that_was_deleted_gets_no_volumes() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let manifest = test_manifests::vm_with_template();
        let owner = stores.objects.apply(&manifest).unwrap().object;
        let expanded = vm::expanded(&owner.object, &[]).unwrap();
        let stored = || store_templates(&stores, &owner, None, &expanded).unwrap().len();
        stores.objects.begin_deletion(&owner.key).unwrap();
        assert_eq!(stored(), 0);
        stores.objects.remove(&owner.key).unwrap();
        assert_eq!(stored(), 0);
        stores.objects.apply(&manifest).unwrap();
        assert_eq!(stored(), 0);
        let volumes = stores
            .objects
            .read_kinds(|kind| kind == Kind::DataVolume)
            .unwrap();
        assert!(volumes.objects.is_empty());
    }
}
