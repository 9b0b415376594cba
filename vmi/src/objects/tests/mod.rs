//! Reading of objects: what each kind gives, and the errors of its values.

mod config;
mod machines;
mod volumes;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn read_all(text: &str) -> Vec<Object> {
    read_objects(text).unwrap()
}

fn one(value: &Value) -> ObjectKind {
    read_all(&value.to_string()).remove(0).kind
}

/// The errors of an object, a line each.
fn faults(value: &Value) -> Vec<String> {
    match read_objects(&value.to_string()) {
        Ok(_) => Vec::new(),
        Err(error) => error.to_string().lines().map(str::to_owned).collect(),
    }
}

#[track_caller]
fn only_fault(value: &Value, want: &str) {
    assert_eq!(faults(value), [want], "{value}");
}

fn secret(fields: Value) -> Value {
    let mut secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}});
    merge(&mut secret, fields);
    secret
}

fn claim(spec: Value) -> Value {
    let mut whole = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
    merge(&mut whole, spec);
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": whole})
}

fn merge(target: &mut Value, fields: Value) {
    for (name, value) in fields.as_object().unwrap() {
        target[name] = value.clone();
    }
}

#[test]
fn a_manifest_gives_its_objects_in_order() {
    let text = "
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Secret, metadata: {name: a}, stringData: {k: v}}
- {apiVersion: v1, kind: Service, metadata: {name: web, namespace: prod}, spec: {any: 1}}
---
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: b}
spec: {domain: {devices: {}}}
---
apiVersion: other.example/v1
kind: Secret
metadata: {name: c}
";
    let objects = read_all(text);
    let names: Vec<_> = objects.iter().map(|object| object.document.as_deref()).collect();
    assert_eq!(names, [Some("a"), Some("prod/web"), Some("b"), Some("c")]);
    assert!(matches!(&objects[0].kind, ObjectKind::Secret(secret) if secret.data["k"] == b"v"));
    assert!(matches!(&objects[1].kind, ObjectKind::Other(other) if other.to_string() == "Service prod/web"));
    assert!(
        matches!(&objects[2].kind, ObjectKind::VirtualMachineInstance(vmi) if vmi.document.as_deref() == Some("b"))
    );
    assert!(matches!(&objects[3].kind, ObjectKind::Other(other) if other.to_string() == "Secret c"));
    assert_eq!(read_all(""), []);
}

#[test]
fn envelopes_have_errors_like_those_of_vms() {
    let version =
        |version: &str, kind: &str| json!({"apiVersion": version, "kind": kind, "metadata": {"name": "a"}});
    only_fault(
        &version("v2", "Secret"),
        "apiVersion: Unsupported value: 'v2' is not supported; use v1",
    );
    only_fault(
        &version("", "ConfigMap"),
        "apiVersion: Unsupported value: '' is not supported; use v1",
    );
    only_fault(
        &version("instancetype.kubevirt.io/v1alpha2", "VirtualMachinePreference"),
        "apiVersion: Unsupported value: 'instancetype.kubevirt.io/v1alpha2' is not supported; use \
         instancetype.kubevirt.io/v1beta1",
    );
    only_fault(
        &secret(json!({"datas": {}})),
        "datas: Invalid value: datas in body is a forbidden property",
    );
    only_fault(
        &secret(json!({"metadata": {}})),
        "metadata.name: Required value: metadata.name in body is required",
    );
    let both = format!("{}\n{}", secret(json!({"a": 1})), claim(json!({"b": 1})));
    assert_eq!(
        read_objects(&both).unwrap_err().to_string(),
        "keys: a: Invalid value: a in body is a forbidden property\n\
         data: spec.b: Invalid value: spec.b in body is a forbidden property"
    );
}

/// Arbitrary JSON with names that exist.
pub(crate) fn any_json() -> impl Strategy<Value = Value> {
    let names = || {
        prop::sample::select(vec![
            "a",
            "name",
            "namespace",
            "metadata",
            "spec",
            "data",
            "stringData",
            "type",
            "source",
            "http",
            "url",
            "checksum",
            "registry",
            "pvc",
            "storage",
            "resources",
            "requests",
            "accessModes",
            "dataSource",
            "kind",
            "template",
            "domain",
            "devices",
            "disks",
            "volumes",
            "cpu",
            "guest",
            "memory",
            "instancetype",
            "preference",
            "inferFromVolume",
            "dataVolumeTemplates",
            "running",
            "labels",
            "annotations",
            "features",
            "interfaces",
        ])
    };
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        names().prop_map(Value::from),
        prop::sample::select(vec!["1Gi", "", "é", "http://a", "docker://a", "YQ==", "md5:"])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(names().prop_map(str::to_owned), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

const KINDS: &[(&str, &str)] = &[
    ("v1", "Secret"),
    ("v1", "ConfigMap"),
    ("v1", "PersistentVolumeClaim"),
    ("cdi.kubevirt.io/v1beta1", "DataVolume"),
    ("instancetype.kubevirt.io/v1beta1", "VirtualMachineInstancetype"),
    (
        "instancetype.kubevirt.io/v1beta1",
        "VirtualMachineClusterPreference",
    ),
    ("kubevirt.io/v1", "VirtualMachine"),
    ("kubevirt.io/v1", "VirtualMachineInstance"),
    ("v1", "Service"),
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_object_makes_reading_panic(
        kind in 0..KINDS.len(),
        body in any_json(),
        spec in any_json(),
        named in any::<bool>(),
    ) {
        let mut object = if body.is_object() { body } else { json!({}) };
        (object["apiVersion"], object["kind"]) = (KINDS[kind].0.into(), KINDS[kind].1.into());
        if named {
            object["metadata"] = json!({"name": "a"});
            object["spec"] = spec;
        }
        if let Err(error) = read_objects(&object.to_string()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn no_text_makes_reading_panic(text in "\\PC{0,200}") {
        let _ = read_objects(&text);
    }
}
