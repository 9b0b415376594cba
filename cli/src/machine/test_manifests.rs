//! Manifests for tests.

use serde_json::{Value, json};

/// A VirtualMachine without volumes.
pub(crate) fn vm(name: &str, strategy: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {"runStrategy": strategy, "template": {"spec": {"domain": {"devices": {}}}}},
    })
}

/// A VirtualMachineInstance without volumes.
pub(crate) fn vmi(name: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name},
        "spec": {"domain": {"devices": {}}},
    })
}

/// A DataVolume of 1 MiB.
pub(crate) fn data_volume(name: &str, source: &Value) -> Value {
    json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1",
        "kind": "DataVolume",
        "metadata": {"name": name},
        "spec": {"source": source, "storage": {"resources": {"requests": {"storage": "1Mi"}}}},
    })
}

/// A VM with the template of the blank DataVolume `demo-root`.
pub(crate) fn vm_with_template() -> Value {
    let mut template = data_volume("demo-root", &json!({"blank": {}}));
    template
        .as_object_mut()
        .unwrap()
        .retain(|field, _| field != "kind" && field != "apiVersion");
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "demo"},
        "spec": {
            "runStrategy": "Always",
            "dataVolumeTemplates": [template],
            "template": {"spec": {
                "domain": {"memory": {"guest": "64Mi"}, "devices": {"disks": [{"name": "root"}]}},
                "volumes": [{"name": "root", "dataVolume": {"name": "demo-root"}}],
            }},
        },
    })
}
