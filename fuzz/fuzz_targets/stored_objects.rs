//! The stores of objects and of volumes on a machine without a cluster, with files that a person or a broken disk has
//! changed. Asserts that a damaged file costs its object alone, and that an object which is stored is read as it was.
#![no_main]

use std::fs;

use arbitrary::Arbitrary;
use husk_claims::{ClaimStore, NewClaim};
use husk_fuzz::host::{JsonEdit, Splice, directory, edit_json, splice};
use husk_fuzz::manifest::WORDS;
use husk_objects::{Key, ObjectStore, Outcome};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

#[derive(Arbitrary, Debug)]
enum Program {
    /// Applies a changed object, then changes its file.
    Object(u8, Vec<JsonEdit>, Vec<Splice>),
    /// Any file in the place of an object.
    File(u8, Vec<u8>),
    Claim(Vec<Splice>, u32),
}

/// Small objects: each run writes and reads them several times.
fn objects() -> [Value; 6] {
    let object = |version: &str, kind: &str| json!({"apiVersion": version, "kind": kind, "metadata": {"name": "x", "labels": {"a": "b"}}});
    let mut all = [
        object("v1", "Secret"),
        object("v1", "ConfigMap"),
        object("kubevirt.io/v1", "VirtualMachineInstance"),
        object("kubevirt.io/v1", "VirtualMachine"),
        object(
            "instancetype.kubevirt.io/v1beta1",
            "VirtualMachineClusterInstancetype",
        ),
        object("cdi.kubevirt.io/v1beta1", "DataVolume"),
    ];
    all[0]["stringData"] = json!({"key": "x"});
    all[0]["immutable"] = json!(true);
    all[1]["data"] = json!({"key": "x"});
    all[1]["metadata"]["namespace"] = json!("test");
    let spec = json!({
        "domain": {"memory": {"guest": "64Mi"}, "devices": {"disks": [{"name": "seed", "disk": {}}]}},
        "volumes": [{"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config\n"}}],
    });
    all[3]["spec"] = json!({"runStrategy": "Always", "template": {"spec": spec}});
    all[2]["spec"] = spec;
    all[4]["spec"] = json!({"cpu": {"guest": 2}, "memory": {"guest": "64Mi"}});
    all[5]["spec"] = json!({
        "source": {"http": {"url": "https://a.example/b.img"}},
        "storage": {"resources": {"requests": {"storage": "1Gi"}}},
    });
    all
}

fuzz_target!(|program: Program| {
    let home = directory();
    match program {
        Program::Object(n, edits, damage) => {
            let all = objects();
            let mut manifest = all[usize::from(n) % all.len()].clone();
            edit_json(&mut manifest, &edits, &WORDS);
            let store = ObjectStore::at(home.path().join("objects"));
            let Ok(applied) = store.apply(&manifest) else {
                assert!(store.read().expect("read").objects.is_empty());
                return;
            };
            assert_eq!(applied.outcome, Outcome::Created);
            let key = applied.object.key.clone();
            assert_eq!(store.get(&key).expect("stored"), applied.object);
            // Whatever text is in it, YAML gives it back.
            match store.apply(&manifest) {
                Ok(again) => assert_eq!(again.outcome, Outcome::Unchanged, "{:?}", again.object.value()),
                Err(error) => panic!("{error}"),
            }
            damaged(&store, &key, &damage);
        }
        Program::File(n, bytes) => {
            let store = ObjectStore::at(home.path().join("objects"));
            let all = objects();
            let key = Key::of(&all[usize::from(n) % all.len()]);
            if let Some(key) = key {
                let file = store.file(&key);
                fs::create_dir_all(file.parent().expect("a parent")).expect("made");
                fs::write(&file, bytes).expect("written");
                damaged(&store, &key, &[]);
            }
        }
        Program::Claim(damage, size) => {
            let store = ClaimStore::at(home.path().join("volumes"));
            store
                .create(&NewClaim::new("default", "good", 1 << 20))
                .expect("made");
            store
                .create(&NewClaim::new("default", "other", 1 << 20))
                .expect("made");
            let file = home.path().join("volumes/default/other/claim.yaml");
            let mut text = fs::read(&file).expect("read");
            splice(&mut text, &damage);
            fs::write(&file, text).expect("written");
            let claims = store.list().expect("listed");
            assert_eq!(claims.len(), 2);
            assert!(store.get("default", "good").is_ok());
            let (before, size) = (store.get("default", "other"), u64::from(size) << 8);
            if let Ok(resized) = store.resize("default", "other", size) {
                assert!(before.is_ok() && resized >= 1 << 20);
                assert_eq!(
                    store.get("default", "other").expect("read").object.spec.size,
                    Some(resized)
                );
            }
            store.remove("default", "other").expect("removed");
            assert_eq!(store.list().expect("listed").len(), 1);
        }
    }
});

/// Changes the file of an object. A Secret beside it stays.
fn damaged(store: &ObjectStore, key: &Key, damage: &[Splice]) {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "beside"}, "stringData": {"a": "b"}});
    let beside = store.apply(&secret).expect("applied").object.key;
    let file = store.file(key);
    let mut text = fs::read(&file).expect("read");
    splice(&mut text, damage);
    fs::write(&file, text).expect("written");
    let all = store.read().expect("read");
    assert!(all.get(&beside).is_some());
    assert_eq!(
        all.objects.len() + all.damaged.len(),
        if *key == beside { 1 } else { 2 }
    );
    if let Some(object) = all.get(key) {
        assert_eq!(object.key, *key);
        let _ = (
            object.uid(),
            object.created(),
            object.is_deleting(),
            object.is_owned_by(object),
        );
        let _ = store.begin_deletion(key);
    }
    store.remove(key).expect("removed");
    assert!(store.get(key).is_err());
}
