//! The OCI configuration of containers, as containerd writes it, with annotations, mounts, devices, limits and the VMI
//! in an annotation. Asserts that a VM which is planned is within what husk-vmi allows, and uses only files of the pod.
#![no_main]

#[allow(dead_code, unused_imports)]
#[path = "../../shim/src/spec/mod.rs"]
mod spec;

use std::collections::BTreeMap;
use std::path::PathBuf;

use arbitrary::Arbitrary;
use husk_fuzz::host::{JsonEdit, edit_json};
use husk_fuzz::manifest;
use husk_vmi::DiskSource;
use libfuzzer_sys::fuzz_target;
use oci_spec::runtime::Spec;
use serde_json::{Value, json};
use spec::{MemoryLimit, Role, VmContainer, annotated_vmi, network, role, uid};

#[derive(Arbitrary, Debug)]
struct Program {
    vmi: Vec<JsonEdit>,
    container: Vec<JsonEdit>,
    sandbox: Option<Vec<JsonEdit>>,
    volumes: u8,
}

const WORDS: &[&str] = &[
    "annotations",
    "mounts",
    "linux",
    "process",
    "args",
    "resources",
    "devices",
    "namespaces",
    "memory",
    "limit",
    "hugepageLimits",
    "pageSize",
    "2MB",
    "1GB",
    "destination",
    "source",
    "options",
    "ro",
    "rw",
    "type",
    "path",
    "major",
    "minor",
    "b",
    "c",
    "network",
    "husk.io/vmi",
    "husk.io/volume",
    "husk.io/vm-container",
    "compute",
    "root",
    "io.kubernetes.cri.container-type",
    "container",
    "sandbox",
    "io.kubernetes.cri.container-name",
    "volumeroot",
    "guest-console-log",
    "io.kubernetes.cri.sandbox-namespace",
    "io.kubernetes.cri.sandbox-uid",
    "5d307ca9-b3ef-428c-8861-06e72d69f223",
    "/usr/bin/virt-launcher-monitor",
    "--name",
    "--namespace",
    "--uid",
    "--qemu-timeout",
    "324s",
    "--no-op",
    "--copy-path",
    "/usr/bin/container-disk",
    "/usr/bin/virt-tail",
    "/dev/claim",
    "/run/kubevirt-private/vmi-disks/claim",
    "/var/run/kubevirt-private/config-map/files",
    "/var/run/kubevirt-private/secret/drive/userdata",
    "/var/run/kubevirt-image-volume/disk_0",
    "/var/run/kubevirt-kernel-boot",
    "/run/kubevirt/hotplug-disks",
    "/run/kubevirt-ephemeral-disks",
    "/var/run/secrets/kubernetes.io/serviceaccount",
    "/pod/x",
    "../x",
    "",
    "/etc/resolv.conf",
    "/proc/1/ns/net",
];

fn container(vmi: &Value) -> Value {
    let mounts = [
        ("/var/run/kubevirt-private/vmi-disks/claim", "/pod/claim"),
        ("/var/run/kubevirt-private/vmi-disks/over", "/pod/over"),
        ("/var/run/kubevirt-private/vmi-disks/host", "/pod/host"),
        ("/var/run/kubevirt-private/config-map/files", "/pod/files"),
        ("/var/run/kubevirt-private/secret/drive/userdata", "/pod/userdata"),
        ("/var/run/kubevirt-private/secret/keys-access-cred", "/pod/keys"),
        ("/var/run/kubevirt-image-volume/disk_0", "/pod/root"),
        ("/var/run/kubevirt-kernel-boot", "/pod/kernel"),
        ("/run/kubevirt/hotplug-disks", "/pod/hotplug"),
        ("/etc/resolv.conf", "/pod/resolv.conf"),
    ];
    let mounts = mounts
        .map(|(to, from)| json!({"destination": to, "source": from, "type": "bind", "options": ["rw"]}));
    json!({
        "ociVersion": "1.1.0",
        "process": {"cwd": "/", "args": ["/pause"], "user": {"uid": 107, "gid": 107}},
        "annotations": {
            "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.container-name": "compute",
            "io.kubernetes.cri.sandbox-name": "pod", "io.kubernetes.cri.sandbox-namespace": "team",
            "io.kubernetes.cri.sandbox-uid": "5d307ca9-b3ef-428c-8861-06e72d69f223", "husk.io/vmi": vmi.to_string(),
        },
        "mounts": mounts,
        "linux": {
            "devices": [{"path": "/dev/null", "type": "c", "major": 1, "minor": 3}],
            "resources": {"memory": {"limit": 1u64 << 30}, "hugepageLimits": [{"pageSize": "2MB", "limit": 1u64 << 30}]},
            "namespaces": [{"type": "network", "path": "/proc/1/ns/net"}],
        },
    })
}

fuzz_target!(|program: Program| {
    let mut vmi = manifest::vmi();
    edit_json(&mut vmi, &program.vmi, &manifest::WORDS);
    let parsed = |edits: &[JsonEdit]| {
        let mut document = container(&vmi);
        edit_json(&mut document, edits, WORDS);
        serde_json::from_value::<Spec>(document).ok()
    };
    let Some(container) = parsed(&program.container) else {
        return;
    };
    let sandbox = program.sandbox.as_deref().and_then(parsed);
    if let Ok(Role::Launcher(args)) = role(&container, sandbox.as_ref()) {
        assert!(!args.name.is_empty() && !args.namespace.is_empty() && args.qemu_timeout.as_secs() <= 86_400);
    }
    let _ = network(&container, sandbox.as_ref());
    let limit = MemoryLimit::of(&container);
    let _ = uid(&container);
    let Ok(vmi) = annotated_vmi(&container) else {
        return;
    };
    let names = ["root", "kernel-boot-volume", "more"];
    let volumes = (0..3).filter(|n| program.volumes >> n & 1 == 1);
    let volumes: BTreeMap<String, PathBuf> = volumes
        .map(|n| (names[n].to_owned(), PathBuf::from("/pod/rootfs")))
        .collect();
    match VmContainer::new(&container, &limit, &vmi, "/pod/rootfs".into(), &volumes) {
        Ok(vm) => {
            assert!((1..=254).contains(&vm.plan.topology.vcpus()));
            for disk in &vm.plan.disks {
                if let DiskSource::HostDisk { path, .. } = &disk.source {
                    assert!(path.is_absolute(), "{}", path.display());
                }
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
