//! Manifests that use most of what is supported, and words for changes of them.

use std::sync::LazyLock;

use husk_vmi::PodResources;
use serde_json::{Value, json};

/// Names of fields, and values that get past the first checks; shared with the property tests of `husk-vmi`.
pub static WORDS: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let words: Vec<String> =
        serde_json::from_str(include_str!("../../vmi/tests/data/words.json")).expect("JSON");
    words.into_iter().map(|word| &*word.leak()).collect()
});

/// Resources for the volumes of [`vmi`].
#[must_use]
pub fn resources() -> PodResources {
    let names = [
        "root",
        "kernel-boot-volume",
        "files",
        "claim",
        "over",
        "drive",
        "keys-access-cred",
    ];
    PodResources {
        volumes: names.map(|name| (name.to_owned(), "/x".into())).into(),
        ..PodResources::default()
    }
}

/// A VMI that uses most of what is supported, and is valid.
pub fn vmi() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "testvmi", "namespace": "default", "uid": "u-1", "labels": {"a": "b"}},
        "spec": spec(),
    })
}

/// The spec of a VMI, shared with the property tests of `husk-vmi`.
fn spec() -> Value {
    serde_json::from_str(include_str!("../../vmi/tests/data/spec.json")).expect("JSON")
}

/// A VM with the spec of [`vmi`] but for what its instance type gives, and the objects that it names.
pub fn objects() -> Vec<Value> {
    let mut spec = spec();
    if let Some(domain) = spec["domain"].as_object_mut() {
        for given in ["cpu", "memory", "resources"] {
            domain.remove(given);
        }
    }
    let object = |version: &str, kind: &str, name: &str, spec: Value| {
        let metadata = json!({"name": name, "namespace": "default", "labels": {"a": "b"}});
        json!({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})
    };
    vec![
        object(
            "kubevirt.io/v1",
            "VirtualMachine",
            "vm",
            json!({
                "runStrategy": "Always", "template": {"metadata": {"labels": {"c": "d"}}, "spec": spec},
                "instancetype": {"kind": "VirtualMachineInstancetype", "name": "small"},
                "preference": {"kind": "VirtualMachinePreference", "name": "linux"},
                "dataVolumeTemplates": [{"metadata": {"name": "made"},
                    "spec": {"source": {"blank": {}}, "storage": {"resources": {"requests": {"storage": "1Gi"}}}}}],
            }),
        ),
        object(
            "instancetype.kubevirt.io/v1beta1",
            "VirtualMachineInstancetype",
            "small",
            json!({"cpu": {"guest": 4, "model": "host-model"}, "memory": {"guest": "128Mi"}, "ioThreadsPolicy": "auto"}),
        ),
        object(
            "instancetype.kubevirt.io/v1beta1",
            "VirtualMachinePreference",
            "linux",
            json!({
                "cpu": {"preferredCPUTopology": "spread", "spreadOptions": {"across": "SocketsCores", "ratio": 2}},
                "devices": {"preferredDiskBus": "scsi", "preferredInterfaceModel": "virtio", "preferredRng": {}},
                "requirements": {"cpu": {"guest": 1}, "memory": {"guest": "64Mi"}},
            }),
        ),
        object(
            "cdi.kubevirt.io/v1beta1",
            "DataVolume",
            "data",
            json!({
                "source": {"http": {"url": "https://a.example/b.img", "secretRef": "s", "certConfigMap": "c"}},
                "pvc": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
            }),
        ),
        object(
            "v1",
            "PersistentVolumeClaim",
            "claim",
            json!({"accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "resources": {"requests": {"storage": "1Gi"}}}),
        ),
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "type": "Opaque",
            "data": {"key": "YQ=="}, "stringData": {"other": "x"}, "immutable": true}),
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"key": "x"},
            "binaryData": {"bytes": "YQ=="}}),
    ]
}
