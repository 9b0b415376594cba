use super::*;
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt;

fn store() -> (tempfile::TempDir, ObjectStore) {
    let folder = tempfile::tempdir().expect("a folder");
    let store = ObjectStore::at(folder.path().join("objects"));
    (folder, store)
}

fn secret(value: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "key"},
        "stringData": {"password": value},
    })
}

fn vm(strategy: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "demo", "namespace": "test"},
        "spec": {"runStrategy": strategy, "template": {"spec": {"domain": {"devices": {}}}}},
        "status": {"printableStatus": "Running"},
    })
}

#[test]
fn an_object_is_created_configured_and_unchanged() {
    let (_folder, store) = store();
    let created = store.apply(&secret("one")).expect("applied");
    assert_eq!((created.outcome, created.before), (Outcome::Created, None));
    assert!(created.object.created().is_some());
    let again = store.apply(&secret("one")).expect("applied");
    assert_eq!(again.outcome, Outcome::Unchanged);
    let changed = store.apply(&secret("two")).expect("applied");
    assert_eq!(changed.outcome, Outcome::Configured);
    assert_eq!(changed.object.uid(), created.object.uid());
    assert_eq!(changed.object.created(), created.object.created());
    assert_eq!(store.get(&created.object.key).expect("stored"), changed.object);
}

#[test]
fn an_object_that_is_too_large_in_yaml_is_refused() {
    let (_folder, store) = store();
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "lines"},
        "data": {"lines": "a\n".repeat(400_000)},
    });
    let error = store.apply(&map).unwrap_err();
    assert!(matches!(error, ObjectError::TooLarge(_)), "{error}");
    assert!(
        error
            .to_string()
            .ends_with("takes more than 1 MiB in YAML: make it smaller")
    );
    assert!(store.read().expect("read").objects.is_empty());
}

#[test]
fn null_values_do_not_change_an_object() {
    let (_folder, store) = store();
    let mut object = vm("Halted");
    object["spec"]["template"]["spec"]["hostname"] = Value::Null;
    let created = store.apply(&object).expect("applied");
    assert_eq!(created.outcome, Outcome::Created);
    let again = store.apply(&object).expect("applied");
    assert_eq!(again.outcome, Outcome::Unchanged);
    assert_eq!(again.object, created.object);
}

#[test]
fn what_is_exported_from_a_cluster_is_taken_without_its_state() {
    let (_folder, store) = store();
    let mut object = vm("Halted");
    object["metadata"]["uid"] = json!("of-the-cluster");
    object["metadata"]["resourceVersion"] = json!("7");
    object["metadata"]["annotations"] = json!({LAST_APPLIED: "{}", "mine": "kept"});
    let stored = store.apply(&object).expect("applied").object;
    assert_ne!(stored.uid(), "of-the-cluster");
    assert_eq!(stored.value()["metadata"].get("resourceVersion"), None);
    assert_eq!(stored.value()["metadata"]["annotations"], json!({"mine": "kept"}));
    assert_eq!(stored.value().get("status"), None);
}

#[test]
fn only_the_owner_reads_the_files() {
    let (folder, store) = store();
    let stored = store.apply(&secret("one")).expect("applied").object;
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    let file = store.file(&stored.key);
    assert_eq!(mode(&file), 0o600);
    let above = file.ancestors().skip(1);
    for directory in above.take_while(|path| *path != folder.path()) {
        assert_eq!(mode(directory), 0o700, "{}", directory.display());
    }
}

#[test]
fn a_person_may_edit_the_files() {
    let (_folder, store) = store();
    let stored = store.apply(&vm("Halted")).expect("applied").object;
    let file = store.file(&stored.key);
    let text = fs::read_to_string(&file).expect("read");
    assert!(text.contains("runStrategy: Halted"), "{text}");
    fs::write(&file, text.replace("Halted", "Always")).expect("written");
    let edited = store.get(&stored.key).expect("stored");
    assert_eq!(edited.value()["spec"]["runStrategy"], "Always");

    fs::write(&file, text.replace("Halted", "Sometimes")).expect("written");
    let error = store.get(&stored.key).expect_err("invalid").to_string();
    assert!(
        error.contains("demo.yaml: ") && error.contains("spec.runStrategy"),
        "{error}"
    );
    let all = store.read().expect("read");
    assert_eq!((all.objects.len(), all.damaged.len()), (0, 1));
    fs::write(&file, text.replace("name: demo", "name: other")).expect("written");
    let error = store.get(&stored.key).expect_err("another object").to_string();
    assert!(error.contains("virtualmachine.kubevirt.io/test/other"), "{error}");
    // The next apply mends it.
    store.apply(&vm("Always")).expect("applied");
    assert_eq!(store.read().expect("read").objects.len(), 1);
}

#[test]
fn an_object_whose_file_is_damaged_keeps_its_identity() {
    let (_folder, store) = store();
    let owners = json!([{"kind": "Owner", "name": "demo", "uid": uuid::Uuid::nil().to_string()}]);
    let mut manifest = vm("Halted");
    manifest["metadata"]["ownerReferences"] = owners.clone();
    let stored = store.apply(&manifest).expect("applied").object;
    let file = store.file(&stored.key);
    let text = fs::read_to_string(&file).expect("read");
    let old = text.replace(
        &stored.created().expect("a time").to_string(),
        "2020-01-02T03:04:05Z",
    );
    for broken in [
        old.replace("Halted", "Sometimes"),
        // No YAML.
        old.replace("runStrategy: Halted", "runStrategy: [Halted"),
        format!("{old}---\nkind: Other\n"),
    ] {
        fs::write(&file, &broken).expect("written");
        store.get(&stored.key).expect_err("damaged");
        let mended = store.apply(&vm("Halted")).expect("applied").object;
        assert_eq!(mended.uid(), stored.uid(), "{broken}");
        assert_eq!(
            mended.value()["metadata"]["creationTimestamp"],
            "2020-01-02T03:04:05Z"
        );
        assert_eq!(mended.value()["metadata"]["ownerReferences"], owners);
    }

    let broken = old.replace("Halted", "Sometimes");
    for other in [
        // A copy of another object's file.
        broken.replace("name: demo\n  namespace", "name: other\n  namespace"),
        broken.replace(stored.uid(), "mine"),
    ] {
        assert_ne!(other, broken);
        fs::write(&file, &other).expect("written");
        let mended = store.apply(&vm("Halted")).expect("applied").object;
        assert_ne!(mended.uid(), stored.uid(), "{other}");
        assert!(mended.uid().parse::<uuid::Uuid>().is_ok(), "{other}");
    }
}

#[test]
fn a_copy_of_an_owner_owns_nothing() {
    let (_folder, store) = store();
    let owner = store.apply(&vm("Halted")).expect("applied").object;
    let mut manifest = secret("one");
    manifest["metadata"]["ownerReferences"] =
        json!([{"kind": "VirtualMachine", "name": "demo", "uid": owner.uid()}]);
    let owned = store.apply(&manifest).expect("applied").object;
    assert!(owned.is_owned_by(&owner) && owned.names_owner(&owner.key));

    let text = fs::read_to_string(store.file(&owner.key)).expect("read");
    let key = Key::new(Kind::VirtualMachine, "test", "copy");
    fs::write(store.file(&key), text.replace("name: demo", "name: copy")).expect("written");
    let copy = store.get(&key).expect("stored");
    assert_eq!(copy.uid(), owner.uid());
    assert!(!owned.is_owned_by(&copy));
}

#[test]
fn an_edit_that_breaks_an_object_is_refused() {
    let (_folder, store) = store();
    let key = store.apply(&vm("Halted")).expect("applied").object.key;
    store
        .edit(&key, |vm| vm["spec"]["runStrategy"] = json!("Sometimes"))
        .expect_err("invalid");
    store
        .edit(&key, |vm| vm["spec"]["runStrategy"] = json!("Always"))
        .expect("edited");
    let vm = store.get(&key).expect("stored");
    assert_eq!(vm.value()["spec"]["runStrategy"], "Always");
}

#[test]
fn a_deletion_is_begun_and_ended() {
    let (_folder, store) = store();
    let key = store.apply(&vm("Always")).expect("applied").object.key;
    assert!(store.begin_deletion(&key).expect("begun").is_deleting());
    assert!(matches!(
        store.apply(&vm("Always")),
        Err(ObjectError::Deleting(_))
    ));
    store.remove(&key).expect("removed");
    assert!(matches!(store.remove(&key), Err(ObjectError::NotFound(_))));
    assert!(store.read().expect("read").objects.is_empty());
    store.apply(&vm("Always")).expect("created again");
}

#[test]
fn a_deletion_begins_on_a_full_disk() {
    let (_folder, store) = store();
    let object = store.apply(&vm("Always")).expect("applied").object;
    let key = &object.key;
    // No new file can be written.
    let full = store.file(key).with_file_name(".demo.new");
    fs::create_dir(&full).expect("made");
    store.edit(key, |_| {}).expect_err("full");
    for _ in 0..2 {
        assert!(store.begin_deletion(key).expect("begun").is_deleting());
        assert!(store.get(key).expect("stored").is_deleting());
        assert!(matches!(
            store.apply(&vm("Always")),
            Err(ObjectError::Deleting(_))
        ));
        assert_eq!(store.cancel_deletion(key).expect("cancelled"), object);
    }
    store.begin_deletion(key).expect("begun");
    fs::remove_dir(&full).expect("removed");
    assert_eq!(store.cancel_deletion(key).expect("cancelled"), object);
    assert_eq!(store.get(key).expect("stored"), object);
    // The file itself says so: a mode cannot take that back.
    store.begin_deletion(key).expect("begun");
    fs::create_dir(&full).expect("made");
    store.cancel_deletion(key).expect_err("full");
    assert!(store.get(key).expect("stored").is_deleting());
    store.remove(key).expect("removed");
}

#[test]
fn what_a_power_cut_leaves_is_removed() {
    let (_folder, store) = store();
    store.remove_leftovers().expect("no store");
    let key = store.apply(&secret("one")).expect("applied").object.key;
    let left = store.file(&key).with_file_name(".other.new");
    fs::write(&left, "kind:").expect("written");
    assert_eq!(store.read().expect("read").objects.len(), 1);
    store.remove_leftovers().expect("removed");
    assert!(!left.exists() && store.get(&key).is_ok());
}

#[test]
fn immutable_data_stays() {
    let (_folder, store) = store();
    let mut object = secret("one");
    object["immutable"] = json!(true);
    store.apply(&object).expect("applied");
    object["metadata"]["labels"] = json!({"a": "b"});
    assert_eq!(
        store.apply(&object).expect("a label").outcome,
        Outcome::Configured
    );
    object["stringData"]["password"] = json!("two");
    assert!(matches!(store.apply(&object), Err(ObjectError::Immutable(_))));
}

#[test]
fn a_kind_without_use_is_refused() {
    let (_folder, store) = store();
    let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}});
    assert!(matches!(store.apply(&object), Err(ObjectError::Kind(kind)) if kind == "Pod"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a person or a broken disk writes into a file costs that object alone.
    #[test]
    fn any_file_is_read_or_damaged(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let (_folder, store) = store();
        let good = store.apply(&secret("one")).expect("applied").object.key;
        let key = store.apply(&vm("Always")).expect("applied").object.key;
        fs::write(store.file(&key), &bytes).expect("written");
        let all = store.read().expect("read");
        prop_assert!(all.get(&good).is_some());
        prop_assert_eq!(all.objects.len() + all.damaged.len(), 2);
        prop_assert!(store.apply(&vm("Always")).is_ok());
    }

    /// Any text survives the way through YAML.
    #[test]
    fn texts_are_kept(text in any::<String>()) {
        let (_folder, store) = store();
        let stored = store.apply(&secret(&text)).expect("applied").object;
        let read = store.get(&stored.key).expect("stored");
        prop_assert_eq!(&read.value()["stringData"]["password"], &json!(text));
    }
}
