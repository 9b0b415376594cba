//! Objects that the cases apply.

use serde_json::{Value, json};

/// Image of a small guest's kernel and initramfs.
pub const GUEST: &str = "localhost/husk/guest:6.12";
/// A containerDisk that boots the same guest with the words `script,button,shell`.
pub const DISK: &str = "localhost/husk/disk:6.12";
/// Image of the nodes' sandboxes, which has a busybox.
const PAUSE: &str = "localhost/husk/pause:1";

/// JSONPath of a field of the condition `kind`.
pub fn condition(kind: &str, field: &str) -> String {
    format!(".status.conditions[?(@.type==\"{kind}\")].{field}")
}

/// A VirtualMachine with a small guest that does the words `words`.
pub fn virtual_machine(name: &str, words: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {"runStrategy": "Always", "template": template(name, words)},
    })
}

/// The same without a VirtualMachine.
pub fn instance(name: &str, words: &str) -> Value {
    let mut vmi = template(name, words);
    vmi["apiVersion"] = json!("kubevirt.io/v1");
    vmi["kind"] = json!("VirtualMachineInstance");
    vmi["metadata"]["name"] = json!(name);
    vmi
}

/// Labels and spec of a VMI. The label `app` is `name`.
pub fn template(name: &str, words: &str) -> Value {
    let container = json!({
        "image": GUEST,
        "imagePullPolicy": "IfNotPresent",
        "kernelPath": "/boot/vmlinuz",
        "initrdPath": "/boot/initrd",
    });
    let arguments = format!("console=ttyS0 quiet husk.do={words}");
    json!({
        "metadata": {"labels": {"husk.io/runtime": "true", "app": name}},
        "spec": {
            "terminationGracePeriodSeconds": 60,
            "domain": {
                "memory": {"guest": "128Mi"},
                "firmware": {"kernelBoot": {"kernelArgs": arguments, "container": container}},
                "devices": {"interfaces": [{"name": "default", "masquerade": {}}]},
            },
            "networks": [{"name": "default", "pod": {}}],
        },
    })
}

/// A volume of `size` at `path` of the node, and a claim of its name that is bound to it.
pub fn local_volume(name: &str, mode: &str, (path, size): (&str, &str), node: &str) -> [Value; 2] {
    let size = json!({"storage": size});
    let here = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [node]});
    let volume = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": size,
            "accessModes": ["ReadWriteOnce"],
            "volumeMode": mode,
            "storageClassName": "local",
            "local": {"path": path},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    });
    let claim = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "volumeMode": mode,
            "storageClassName": "local",
            "volumeName": name,
            "resources": {"requests": size},
        },
    });
    [volume, claim]
}

/// A pod without a VM, that serves the file `/name` on port 80.
pub fn client_pod(name: &str) -> Value {
    let serve =
        format!("mkdir -p /tmp/www && echo {name} > /tmp/www/name && exec busybox httpd -f -h /tmp/www");
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "client", "image": PAUSE, "command": ["/bin/sh", "-c", serve]}],
        },
    })
}

/// A pod with the node's filesystem at `/host`.
pub fn node_shell() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "node-shell"},
        "spec": {
            "hostPID": true,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{
                "name": "shell",
                "image": PAUSE,
                "command": ["/bin/busybox", "sleep", "1000000000"],
                "securityContext": {"privileged": true},
                "volumeMounts": [{"name": "host", "mountPath": "/host"}],
            }],
            "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        },
    })
}
