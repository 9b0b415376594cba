use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use husk_vmi::{DiskSource, SeedData, Vmi};
use oci_spec::runtime::Spec;
use serde_json::{Value, json};

use super::*;

const MIB: u64 = 1 << 20;

fn spec(value: Value) -> Spec {
    let mut spec = json!({"ociVersion": "1.1.0", "linux": {}});
    let object = spec.as_object_mut().unwrap();
    object.extend(value.as_object().unwrap().clone());
    serde_json::from_value(spec).unwrap()
}

fn vmi(volumes: Value, disks: Value) -> String {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "demo"},
        "spec": {
            "domain": {"memory": {"guest": "64Mi"}, "devices": {"disks": disks}},
            "volumes": volumes,
        },
    })
    .to_string()
}

fn disk(name: &str) -> Value {
    json!({"name": name, "disk": {"bus": "virtio"}})
}

fn container_disk() -> String {
    let volumes = json!([{"name": "root", "containerDisk": {"image": "debian"}}]);
    vmi(volumes, json!([disk("root")]))
}

fn in_pod(name: &str, own: Value) -> Spec {
    let mut annotations = json!({
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.container-name": name,
        "io.kubernetes.cri.sandbox-name": "demo-pod",
        "io.kubernetes.cri.sandbox-namespace": "team",
        "husk.io/vmi": container_disk(),
    });
    let object = annotations.as_object_mut().unwrap();
    object.extend(own.as_object().unwrap().clone());
    spec(json!({"annotations": annotations}))
}

fn sandbox(own: Value) -> Spec {
    let mut annotations = json!({
        "io.kubernetes.cri.container-type": "sandbox",
        "husk.io/vmi": container_disk(),
    });
    let object = annotations.as_object_mut().unwrap();
    object.extend(own.as_object().unwrap().clone());
    spec(json!({"annotations": annotations}))
}

fn make(spec: &Spec) -> Result<VmContainer, SpecError> {
    make_from(spec, &annotated_vmi(spec)?, &BTreeMap::new())
}

fn make_from(spec: &Spec, vmi: &Vmi, volumes: &BTreeMap<String, PathBuf>) -> Result<VmContainer, SpecError> {
    VmContainer::new(spec, &MemoryLimit::of(spec), vmi, "/rootfs".into(), volumes)
}

#[test]
fn names_tell_a_pods_containers_apart() {
    let pod = sandbox(json!({}));
    let role = |container: &Spec| role(container, Some(&pod));
    assert_eq!(role(&pod).unwrap(), Role::Sandbox);
    assert_eq!(role(&in_pod("compute", json!({}))).unwrap(), Role::Vm);
    let root = Role::Volume("root".into());
    assert_eq!(role(&in_pod("volumeroot", json!({}))).unwrap(), root);
    let own = json!({"husk.io/volume": "root"});
    assert_eq!(role(&in_pod("disk", own)).unwrap(), root);
    for (other, why) in [
        ("sidecar", "sidecar"),
        ("volumedata", "a volume the VM does not have"),
    ] {
        let error = role(&in_pod(other, json!({}))).unwrap_err().to_string();
        let begins =
            format!("container {other:?} of pod team/demo-pod cannot run: a pod of the runtime class husk");
        assert!(error.starts_with(&begins), "{why}: {error}");
    }
}

#[test]
fn annotation_renames_the_vm_container() {
    let pod = sandbox(json!({"husk.io/vm-container": "vm"}));
    assert_eq!(role(&in_pod("vm", json!({})), Some(&pod)).unwrap(), Role::Vm);
    role(&in_pod("compute", json!({})), Some(&pod)).unwrap_err();
}

#[test]
fn lone_container_is_the_vm_or_refused() {
    let alone = |annotations| role(&spec(json!({"annotations": annotations})), None);
    assert_eq!(alone(json!({"husk.io/vmi": "{}"})).unwrap(), Role::Vm);
    let both = json!({"husk.io/vmi": "{}", "husk.io/volume": "root"});
    assert_eq!(alone(both).unwrap(), Role::Vm);
    let error = alone(json!({})).unwrap_err().to_string();
    assert!(
        error.starts_with("this container has no annotation husk.io/vmi"),
        "{error}"
    );
    let error = alone(json!({"husk.io/volume": "root"})).unwrap_err().to_string();
    assert!(error.contains("is not in a pod"), "{error}");
}

#[test]
fn lone_container_disk_is_the_containers_root() {
    let alone = spec(json!({"annotations": {"husk.io/vmi": container_disk()}}));
    let vm = make(&alone).unwrap();
    let wanted = DiskSource::ContainerDisk {
        path: "/rootfs".into(),
        image_path: None,
    };
    assert_eq!(vm.plan.disks[0].source, wanted);
    // In a pod the volume has a container of its own.
    let error = make(&in_pod("compute", json!({}))).unwrap_err().to_string();
    assert_eq!(
        error,
        "annotation husk.io/vmi: spec.volumes[0].containerDisk: Required value: no container of this pod provides volume \
         \"root\" yet: add one named volumeroot, before the VM's own in the list"
    );
    let volumes = BTreeMap::from([("root".to_owned(), PathBuf::from("/other/rootfs"))]);
    let compute = in_pod("compute", json!({}));
    let vmi = annotated_vmi(&compute).unwrap();
    let vm = make_from(&compute, &vmi, &volumes).unwrap();
    assert_eq!(vm.plan.namespace, "team");
    assert!(
        matches!(&vm.plan.disks[0].source, DiskSource::ContainerDisk { path, .. } if path == Path::new("/other/rootfs"))
    );
}

#[test]
fn mounts_are_volumes_where_kubevirt_has_them() {
    let volumes = json!([
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "host", "hostDisk": {"path": "/srv/vms/host.img", "type": "Disk"}},
        {"name": "keys", "secret": {"secretName": "keys"}},
        {"name": "sa", "serviceAccount": {"serviceAccountName": "default"}},
        {"name": "metrics", "downwardMetrics": {}},
    ]);
    let disks = json!([
        disk("data"),
        disk("host"),
        disk("keys"),
        disk("sa"),
        disk("metrics")
    ]);
    let mounts = json!([
        {"destination": "/var/run/kubevirt-private/vmi-disks/data",
         "source": "/pods/1/data", "options": ["rbind", "rw"]},
        {"destination": "/var/run/kubevirt-private/vmi-disks/host", "source": "/srv/vms", "options": ["rbind"]},
        {"destination": "/run/kubevirt-private/secret/keys", "source": "/pods/1/keys", "options": ["rbind", "ro"]},
        {"destination": "/var/run/secrets/kubernetes.io/serviceaccount", "source": "/pods/1/sa", "options": ["ro"]},
        {"destination": "/var/run/kubevirt-private/downwardmetric-disk", "source": "/pods/1/metrics"},
        {"destination": "/var/run/kubevirt-ephemeral-disks", "source": "/pods/1/scratch"},
        {"destination": "/var/run/kubevirt/hotplug-disks", "source": "/pods/1/hotplug"},
        {"destination": "/proc", "source": "proc", "type": "proc"},
        {"destination": "/etc/hosts", "source": "/pods/1/hosts"},
    ]);
    let annotations = json!({"husk.io/vmi": vmi(volumes, disks)});
    let vm = make(&spec(json!({"annotations": annotations, "mounts": mounts}))).unwrap();
    let sources: Vec<&DiskSource> = vm.plan.disks.iter().map(|disk| &disk.source).collect();
    let files = |dir: &str| DiskSource::Files {
        dir: Some(dir.into()),
        label: "cfgdata".into(),
    };
    assert_eq!(*sources[0], DiskSource::File("/pods/1/data".into()));
    let host = DiskSource::HostDisk {
        path: "/srv/vms/host.img".into(),
        create_bytes: None,
    };
    assert_eq!(*sources[1], host);
    assert_eq!(
        [sources[2], sources[3]],
        [&files("/pods/1/keys"), &files("/pods/1/sa")]
    );
    assert_eq!(*sources[4], DiskSource::DownwardMetrics);
    assert_eq!(vm.ephemeral.as_deref(), Some(Path::new("/pods/1/scratch")));
    assert_eq!(vm.given.hotplug.as_deref(), Some(Path::new("/pods/1/hotplug")));
}

#[test]
fn launcher_pods_have_image_volumes_and_keys_of_secrets() {
    let volumes = json!([
        {"name": "seed", "cloudInitNoCloud": {"secretRef": {"name": "seed"}}},
        {"name": "root", "containerDisk": {"image": "debian"}},
    ]);
    let mounts = json!([
        {"destination": "/var/run/kubevirt-image-volume/disk_1", "source": "/images/1", "options": ["ro"]},
        {"destination": "/var/run/kubevirt-private/secret/seed/userdata", "source": "/keys/0"},
        {"destination": "/var/run/kubevirt-private/secret/seed/userData", "source": "/keys/1"},
    ]);
    let compute = spec(json!({"mounts": mounts}));
    let vmi = load_vmi(&vmi(volumes, json!([disk("seed"), disk("root")])), &compute).unwrap();
    let vm = make_from(&compute, &vmi, &BTreeMap::new()).unwrap();
    let wanted = DiskSource::ContainerDisk {
        path: "/images/1".into(),
        image_path: None,
    };
    assert_eq!(vm.plan.disks[1].source, wanted);
    let DiskSource::CloudInit { user_data, .. } = &vm.plan.disks[0].source else {
        panic!("{:?}", vm.plan.disks[0].source)
    };
    let files = ["/keys/0", "/keys/1"].map(PathBuf::from);
    assert_eq!(*user_data, SeedData::SecretFiles(files.into()));
}

#[test]
fn launcher_containers_need_no_annotation() {
    let pod = spec(json!({"annotations": {"io.kubernetes.cri.container-type": "sandbox"}}));
    let container = |name: &str, args: Value| {
        let annotations = json!({
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.container-name": name,
        });
        let process = json!({"cwd": "/", "user": {"uid": 107, "gid": 107}, "args": args});
        spec(json!({"annotations": annotations, "process": process}))
    };
    let role = |name: &str, args: Value| role(&container(name, args), Some(&pod));
    let monitor = json!([
        "/usr/bin/virt-launcher-monitor",
        "--name",
        "vm",
        "--namespace",
        "team",
        "--uid",
        "1"
    ]);
    assert!(matches!(role("compute", monitor).unwrap(), Role::Launcher(args) if args.name == "vm"));
    let disk = json!(["/usr/bin/container-disk", "--copy-path", "/disks/disk_0"]);
    assert_eq!(
        role("volumeroot", disk).unwrap(),
        Role::LauncherVolume("root".into())
    );
    let error = role("virtiofs-data", json!(["/usr/libexec/virtiofsd"])).unwrap_err();
    assert!(error.to_string().contains("virtiofs-data"), "{error}");
}

#[test]
fn annotations_of_a_vmi_have_no_effect_in_its_launcher_pod() {
    let own = |container: &str| {
        json!({
            "io.kubernetes.cri.sandbox-name": "virt-launcher-demo-x7k2p",
            "husk.io/vm-container": container,
            "husk.io/volume": "root",
        })
    };
    for name in ["hook-sidecar-0", "volumeroot", "compute"] {
        let container = in_pod(name, own(name));
        for pod in [None, Some(sandbox(own(name)))] {
            role(&container, pod.as_ref()).unwrap_err();
        }
        annotated_vmi(&container).unwrap_err();
    }
    let compute = in_pod("compute", own("compute"));
    let vmi = load_vmi(&container_disk(), &compute).unwrap();
    let planned = make_from(&compute, &vmi, &BTreeMap::new());
    let error = planned.unwrap_err().to_string();
    assert!(
        error.contains("no container of this pod provides volume \"root\""),
        "{error}"
    );
}

#[test]
fn missing_hotpluggable_volumes_are_plugged_later() {
    let hot = |name: &str| json!({"name": name, "dataVolume": {"name": name, "hotpluggable": true}});
    let root = json!({"name": "root", "persistentVolumeClaim": {"claimName": "root"}});
    let volumes = json!([hot("late"), root, hot("given"), hot("cd")]);
    let late = json!({"name": "late", "disk": {"bus": "scsi"}});
    let drive = json!({"name": "cd", "cdrom": {"bus": "sata"}});
    let text = vmi(volumes, json!([late, disk("root"), drive]));
    let mounts = json!([
        {"destination": "/var/run/kubevirt-private/vmi-disks/root", "source": "/pods/1/root"},
        {"destination": "/var/run/kubevirt-private/vmi-disks/given", "source": "/pods/1/given"},
    ]);
    let annotations = json!({"husk.io/vmi": text});
    let vm = make(&spec(json!({"annotations": annotations, "mounts": mounts}))).unwrap();
    let names: Vec<&str> = vm.plan.disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!(names, ["root", "cd", "given"]);
    assert!(vm.plan.disks[1].is_empty_drive());
    // A volume container is recognised by its name.
    let loaded = husk_vmi::load(&text).unwrap().remove(0);
    let husk_vmi::Loaded::Vmi(loaded) = loaded else {
        panic!("{loaded:?}")
    };
    let live = vm.plan.live(&loaded).unwrap();
    let names: Vec<&str> = live.volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, ["late", "cd"]);
}

#[test]
fn manifest_cannot_open_paths_of_the_node() {
    let volumes = json!([
        {"name": "host", "hostDisk": {"path": "/etc/shadow", "type": "Disk"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
    ]);
    let annotations = json!({"husk.io/vmi": vmi(volumes, json!([disk("host"), disk("data")]))});
    let error = make(&spec(json!({"annotations": annotations})))
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "annotation husk.io/vmi: spec.volumes[0].hostDisk.path: Required value: paths of the node are not opened for pods: mount \
         the directory of \"/etc/shadow\" at /var/run/kubevirt-private/vmi-disks/host; spec.volumes[1]: Required value: the VM's \
         container provides no data for volume \"data\": mount its claim at /var/run/kubevirt-private/vmi-disks/data, or give \
         it as the device /dev/data"
    );
    // A file called .. has no name.
    let volumes = json!([{"name": "host", "hostDisk": {"path": "/srv/..", "type": "Disk"}}]);
    let mounts = json!([{"destination": "/var/run/kubevirt-private/vmi-disks/host", "source": "/srv"}]);
    let annotations = json!({"husk.io/vmi": vmi(volumes, json!([disk("host")]))});
    make(&spec(json!({"annotations": annotations, "mounts": mounts}))).unwrap_err();
}

#[test]
fn read_only_mounts_are_not_written() {
    let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]);
    let mounts = json!([
        {"destination": "/var/run/kubevirt-private/vmi-disks/data",
         "source": "/pods/1/data", "options": ["rbind", "ro"]}
    ]);
    let with = |disk: Value| {
        let annotations = json!({"husk.io/vmi": vmi(volumes.clone(), json!([disk]))});
        make(&spec(json!({"annotations": annotations, "mounts": mounts})))
    };
    let error = with(disk("data")).unwrap_err().to_string();
    assert!(
        error
            .contains("spec.domain.devices.disks[0]: Invalid value: volume \"data\" is read-only in the pod"),
        "{error}"
    );
    with(json!({"name": "data", "disk": {"bus": "virtio", "readonly": true}})).unwrap();
}

/// A VM with the disk `/dev/data`, the container's block device `major`:0, to which it has `access`.
fn with_device(major: i64, access: &str, disk: &Value) -> Result<VmContainer, SpecError> {
    let devices = json!([
        {"path": "/dev/data", "type": "b", "major": major, "minor": 0},
        {"path": "/dev/null", "type": "c", "major": 1, "minor": 3},
    ]);
    let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]);
    let annotations = json!({"husk.io/vmi": vmi(volumes, json!([disk]))});
    let rules = json!([
        {"allow": false, "access": "rwm"},
        {"allow": true, "type": "b", "major": major, "minor": 0, "access": access},
    ]);
    let linux = json!({"devices": devices, "resources": {"devices": rules}});
    make(&spec(json!({"annotations": annotations, "linux": linux})))
}

/// Major number of a block device of this host with minor number 0.
fn block_device() -> i64 {
    std::fs::read_dir("/sys/dev/block")
        .unwrap()
        .find_map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            name.strip_suffix(":0")?.parse().ok()
        })
        .expect("a block device with minor number 0")
}

#[test]
#[ignore = "needs a block device with minor number 0"]
fn read_only_devices_are_not_written() {
    let major = block_device();
    let error = with_device(major, "r", &disk("data")).unwrap_err().to_string();
    assert!(
        error
            .contains("spec.domain.devices.disks[0]: Invalid value: volume \"data\" is read-only in the pod"),
        "{error}"
    );
    let readonly = json!({"name": "data", "disk": {"bus": "virtio", "readonly": true}});
    with_device(major, "r", &readonly).unwrap();
    with_device(major, "mrw", &disk("data")).unwrap();
}

#[test]
fn device_missing_on_the_host_is_refused() {
    let error = with_device(4095, "rwm", &disk("data")).unwrap_err().to_string();
    assert_eq!(
        error,
        "device /dev/data (4095:0) of the container is not a block device of this host"
    );
}

#[test]
#[ignore = "needs a block device with minor number 0"]
fn devices_are_found_by_their_numbers() {
    let major = block_device();
    let vm = with_device(major, "rwm", &disk("data")).unwrap();
    let DiskSource::File(path) = &vm.plan.disks[0].source else {
        panic!("{:?}", vm.plan.disks[0].source);
    };
    assert_eq!(
        vm.given.devices[path],
        rustix::fs::makedev(u32::try_from(major).unwrap(), 0)
    );
}

#[test]
fn memory_limit_too_small_is_refused_with_numbers() {
    let with = |limit: u64| {
        let annotations = json!({"husk.io/vmi": container_disk()});
        let linux = json!({"resources": {"memory": {"limit": limit}}});
        make(&spec(json!({"annotations": annotations, "linux": linux})))
    };
    let error = with(72 * MIB).unwrap_err().to_string();
    assert_eq!(
        error,
        "the memory limit of this container is 72 MiB, and the VM needs 80.1 MiB: 64 MiB for the guest and 16.1 MiB \
         overhead; raise resources.limits.memory, or lower spec.domain.memory.guest"
    );
    with(82 * MIB).unwrap();
    with(0).unwrap();
}

#[test]
fn annotation_must_hold_one_valid_vmi() {
    let with = |text: &str| {
        let annotations = json!({"husk.io/vmi": text});
        make(&spec(json!({"annotations": annotations})))
            .unwrap_err()
            .to_string()
    };
    for (text, wanted) in [
        ("{", "annotation husk.io/vmi: "),
        ("{}", "annotation husk.io/vmi: "),
        ("[", "annotation husk.io/vmi: "),
    ] {
        let error = with(text);
        assert!(error.starts_with(wanted) && !error.contains('\n'), "{error}");
    }
    let two = format!("{}{}", container_disk(), container_disk());
    assert!(with(&two).contains("found 2 objects"), "{}", with(&two));
    let wrong = container_disk().replace("\"root\",\"disk\"", "\"other\",\"disk\"");
    let wrong = wrong.replacen("\"name\":\"root\"", "\"name\":\"Root_\"", 1);
    assert!(with(&wrong).contains("spec."), "{}", with(&wrong));
}

#[test]
fn network_is_the_sandboxs_and_never_the_nodes() {
    let with = |namespaces: Value| spec(json!({"linux": {"namespaces": namespaces}}));
    let given = with(json!([{"type": "network", "path": "/run/netns/pod"}, {"type": "ipc"}]));
    let (own, nodes) = (with(json!([{"type": "network"}])), with(json!([])));
    let found = network(&nodes, Some(&given)).unwrap().unwrap();
    assert_eq!(found.netns, Path::new("/run/netns/pod"));
    assert_eq!(
        network(&given, None).unwrap().unwrap().netns,
        Path::new("/run/netns/pod")
    );
    assert_eq!(network(&own, None).unwrap(), None);
    let error = network(&nodes, Some(&nodes)).unwrap_err().to_string();
    assert!(
        error.starts_with("this container is on the node's own network"),
        "{error}"
    );
}
