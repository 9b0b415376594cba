//! Every admission rule: the manifest that breaks it, the reason, the field and the exact text. Named by the rule's id.

mod common;

use common::{faults, refused, with};
use serde_json::{Value, json};

const INVALID: &str = "FieldValueInvalid";
const REQUIRED: &str = "FieldValueRequired";
const DUPLICATE: &str = "FieldValueDuplicate";
const UNSUPPORTED: &str = "FieldValueNotSupported";
const MISSING: &str = "FieldValueNotFound";

const REQUEST: &str = "spec.domain.resources.requests.memory";
const LIMIT: &str = "spec.domain.resources.limits.memory";
const DISK: &str = "spec.domain.devices.disks[0]";
const NIC: &str = "spec.domain.devices.interfaces[0]";

#[test]
fn the_base_has_no_fault() {
    assert_eq!(faults(&with(&[])), []);
}

fn memory(request: &str, more: &[(&'static str, Value)]) -> Vec<(&'static str, Value)> {
    let mut changes = vec![("domain/resources/requests/memory", json!(request))];
    changes.extend_from_slice(more);
    changes
}

#[test]
fn m0_some_memory() {
    refused(
        &[("domain/resources", json!({}))],
        REQUIRED,
        "",
        "no memory requested, at least one of 'spec.domain.memory.guest', 'spec.domain.memory.hugepages.size' or \
         'spec.domain.resources.requests.memory' must be set",
    );
}

#[test]
fn m1_at_least_a_megabyte() {
    refused(
        &memory("64Ki", &[]),
        INVALID,
        REQUEST,
        &format!("{REQUEST} '64Ki': must be greater than or equal to 1M."),
    );
}

#[test]
fn m2_never_negative() {
    refused(
        &memory("-1Gi", &[]),
        INVALID,
        REQUEST,
        &format!("{REQUEST} '-1Gi': must be greater than or equal to 0."),
    );
    let limit = [("domain/resources/limits/memory", json!("-1"))];
    refused(
        &limit,
        INVALID,
        LIMIT,
        &format!("{LIMIT} '-1': must be greater than or equal to 0."),
    );
}

#[test]
fn m3_request_within_limit() {
    let changes = memory("128Mi", &[("domain/resources/limits/memory", json!("64Mi"))]);
    refused(
        &changes,
        INVALID,
        REQUEST,
        &format!("{REQUEST} '128Mi' is greater than {LIMIT} '64Mi'"),
    );
}

#[test]
fn m4_guest_within_limit() {
    let changes = [
        ("domain/resources/limits/memory", json!("128Mi")),
        ("domain/memory/guest", json!("129Mi")),
    ];
    let field = "spec.domain.memory.guest";
    let text = format!("{field} '129Mi' must be equal to or less than the memory limit {LIMIT} '128Mi'");
    refused(&changes, INVALID, field, &text);
}

#[test]
fn m5_m6_m7_huge_pages() {
    let field = "spec.domain.hugepages.size";
    let pages = |size: &str| ("domain/memory/hugepages/pageSize", json!(size));
    refused(
        &[pages("2Mx")],
        INVALID,
        field,
        &format!(
            "{field} '2Mx': quantities must match the regular expression \
             '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        ),
    );
    let text = format!("{REQUEST} '128Mi' must be equal to or larger than page size {field} '1Gi'");
    refused(&[pages("1Gi")], INVALID, REQUEST, &text);
    let text = format!("{REQUEST} '129Mi' is not a multiple of the page size {field} '2Mi'");
    refused(&memory("129Mi", &[pages("2Mi")]), INVALID, REQUEST, &text);
}

#[test]
fn p0_p1_cpu_resources() {
    let request = "spec.domain.resources.requests.cpu";
    let limit = "spec.domain.resources.limits.cpu";
    let text = format!("{request} '-200m': must be greater than or equal to 0.");
    refused(
        &[("domain/resources/requests/cpu", json!("-200m"))],
        INVALID,
        request,
        &text,
    );
    let text = format!("{limit} '-1': must be greater than or equal to 0.");
    refused(
        &[("domain/resources/limits/cpu", json!(-1))],
        INVALID,
        limit,
        &text,
    );
    let changes = [
        ("domain/resources/requests/cpu", json!("2500m")),
        ("domain/resources/limits/cpu", json!("500m")),
    ];
    refused(
        &changes,
        INVALID,
        request,
        &format!("{request} '2500m' is greater than {limit} '500m'"),
    );
}

#[test]
fn p2_feature_policies() {
    refused(
        &[(
            "domain/cpu/features",
            json!([{"name": "lahf_lm", "policy": "invalid"}]),
        )],
        UNSUPPORTED,
        "spec.domain.cpu.features[0].policy",
        "CPU feature lahf_lm uses policy invalid that is not supported.",
    );
}

#[test]
fn p3_isolated_emulator_thread() {
    refused(
        &[("domain/cpu/isolateEmulatorThread", json!(true))],
        INVALID,
        "spec.domain.cpu.isolateEmulatorThread",
        "IsolateEmulatorThread should be only set in combination with DedicatedCPUPlacement",
    );
}

#[test]
fn p4_to_p10_dedicated_cpus() {
    let cpu = "spec.domain.cpu.dedicatedCpuPlacement";
    let request = "spec.domain.resources.requests.cpu";
    let limit = "spec.domain.resources.limits.cpu";
    let dedicated = |resources: Value, cpu: Value| [("domain/cpu", cpu), ("domain/resources", resources)];
    let on = json!({"dedicatedCpuPlacement": true});
    let text = format!("{REQUEST} or {LIMIT} should be provided");
    refused(
        &dedicated(json!({"requests": {"cpu": 1}}), on.clone()),
        INVALID,
        LIMIT,
        &text,
    );
    let text = "provided resources CPU requests/limits must be an interger";
    refused(
        &dedicated(json!({"requests": {"cpu": "500m"}}), on.clone()),
        INVALID,
        request,
        text,
    );
    let text = format!("{REQUEST} must be equal to {LIMIT}");
    let resources = json!({"requests": {"memory": "64Mi"}, "limits": {"memory": "65Mi"}});
    refused(&dedicated(resources, on.clone()), INVALID, REQUEST, &text);
    let text = format!(
        "either {request} or {limit} or spec.domain.cpu.cores must be provided when DedicatedCPUPlacement is true"
    );
    refused(
        &dedicated(json!({"requests": {"memory": "64Mi"}}), on.clone()),
        INVALID,
        cpu,
        &text,
    );
    let text = format!("{request} or {limit} must be equal when DedicatedCPUPlacement is true");
    refused(
        &dedicated(json!({"requests": {"cpu": 2}, "limits": {"cpu": 4}}), on.clone()),
        INVALID,
        cpu,
        &text,
    );
    let cores = json!({"dedicatedCpuPlacement": true, "cores": 2, "threads": 3});
    let text = format!(
        "{request} or {limit} must not be provided at the same time with spec.domain.cpu.cores when \
         DedicatedCPUPlacement is true"
    );
    refused(
        &dedicated(json!({"requests": {"cpu": 2}}), cores.clone()),
        INVALID,
        cpu,
        &text,
    );
    let text = "Not more than two threads must be provided at spec.domain.cpu.threads (got 3) when \
                DedicatedCPUPlacement is true";
    refused(
        &dedicated(json!({"requests": {"memory": "64Mi"}}), cores),
        INVALID,
        cpu,
        text,
    );
}

#[test]
fn p11_sockets_within_maximum() {
    refused(
        &[("domain/cpu", json!({"sockets": 8, "maxSockets": 4}))],
        INVALID,
        "spec.domain.cpu.sockets",
        "Number of sockets in CPU topology is greater than the maximum sockets allowed",
    );
}

fn volumes(list: Value) -> [(&'static str, Value); 2] {
    [("volumes", list), ("domain/devices/disks", json!([]))]
}

#[test]
fn v1_d1_n1_i1_lists_are_bounded() {
    let many = |make: fn(usize) -> Value| json!((0..257).map(make).collect::<Vec<_>>());
    refused(
        &volumes(many(
            |i| json!({"name": format!("v{i}"), "emptyDisk": {"capacity": "1Gi"}}),
        )),
        INVALID,
        "spec.volumes",
        "spec.volumes list exceeds the 256 element limit in length",
    );
    for (pointer, field) in [
        ("domain/devices/disks", "spec.domain.devices.disks"),
        ("networks", "spec.networks"),
        ("domain/devices/interfaces", "spec.domain.devices.interfaces"),
    ] {
        let list = many(|i| json!({"name": format!("v{i}")}));
        let text = format!("{field} list exceeds the 256 element limit in length");
        refused(&[(pointer, list)], INVALID, field, &text);
    }
}

#[test]
fn v2_volume_names_are_unique() {
    let disk = json!({"name": "root", "emptyDisk": {"capacity": "1Gi"}});
    refused(
        &volumes(json!([disk, disk])),
        INVALID,
        "spec.volumes[1].name",
        "spec.volumes[1] and spec.volumes[0] must not have the same Name.",
    );
}

#[test]
fn v3_one_source() {
    let text = "spec.volumes[0] must have exactly one source type set";
    refused(
        &volumes(json!([{"name": "root"}])),
        INVALID,
        "spec.volumes[0]",
        text,
    );
    let two = json!([{"name": "root", "emptyDisk": {"capacity": "1Gi"}, "dataVolume": {"name": "x"}}]);
    refused(&volumes(two), INVALID, "spec.volumes[0]", text);
}

#[test]
fn v5_v6_names_of_sources() {
    let list = volumes(json!([{"name": "a", "dataVolume": {"name": ""}}]));
    refused(
        &list,
        REQUIRED,
        "spec.volumes[0].name",
        "DataVolume 'name' must be set",
    );
    for (source, field) in [
        (json!({"name": "a", "configMap": {}}), "configMap.name"),
        (json!({"name": "a", "secret": {}}), "secret.secretName"),
        (
            json!({"name": "a", "serviceAccount": {}}),
            "serviceAccount.serviceAccountName",
        ),
    ] {
        let field = format!("spec.volumes[0].{field}");
        refused(
            &volumes(json!([source])),
            INVALID,
            &field,
            &format!("{field} is a required field"),
        );
    }
}

#[test]
fn v7_one_of_a_kind() {
    for (source, name) in [
        ("serviceAccount", "serviceAccount"),
        ("downwardMetrics", "downwardMetric"),
        ("memoryDump", "memory dump"),
    ] {
        let list = json!([{"name": "a", source: {}}, {"name": "b", source: {}}]);
        let text = format!("spec.volumes must have max one {name} volume set");
        refused(&volumes(list), INVALID, "spec.volumes", &text);
    }
}

#[test]
fn v8_v9_paths_in_images() {
    let field = "spec.volumes[0].containerDisk";
    let list = |path: &str| volumes(json!([{"name": "a", "containerDisk": {"image": "i", "path": path}}]));
    refused(
        &list("/"),
        INVALID,
        field,
        &format!("{field} must not point to root"),
    );
    for path in ["disk.img", "/a/../b", "/a//b", "/./a", "//", "/a/"] {
        let text = format!("{field} must be an absolute path to a file without relative components");
        refused(&list(path), INVALID, field, &text);
    }
}

#[test]
fn c1_to_c5_cloud_init() {
    let field = "spec.volumes[0].cloudInitNoCloud";
    let list = |source: Value| volumes(json!([{"name": "a", "cloudInitNoCloud": source}]));
    let text = format!("{field} must have only one userdatasource set.");
    refused(
        &list(json!({"userData": "a", "userDataBase64": "YQ=="})),
        INVALID,
        field,
        &text,
    );
    let text = format!("{field} must have only one networkdata source set.");
    refused(
        &list(json!({"networkData": "a", "networkDataBase64": "YQ=="})),
        INVALID,
        field,
        &text,
    );
    let text =
        format!("{field} userdata exceeds 2048 byte limit. Should use UserDataSecretRef for larger data.");
    refused(
        &list(json!({"userData": "a".repeat(2049)})),
        INVALID,
        field,
        &text,
    );
    let text = format!(
        "{field} networkdata exceeds 2048 byte limit. Should use NetworkDataSecretRef for larger data."
    );
    refused(
        &list(json!({"networkData": "a".repeat(2049)})),
        INVALID,
        field,
        &text,
    );
    let text = format!("{field} must have at least one userdatasource or one networkdatasource set.");
    refused(&list(json!({})), INVALID, field, &text);
    refused(&list(json!({"userData": ""})), INVALID, field, &text);
    for name in ["userDataBase64", "networkDataBase64"] {
        let field = format!("{field}.{name}");
        let text = format!("{field} is not a valid base64 value.");
        refused(
            &list(json!({name: "#######garbage******"})),
            INVALID,
            &field,
            &text,
        );
    }
    assert_eq!(faults(&with(&list(json!({"userData": "a".repeat(2048)})))), []);
}

#[test]
fn h2_h3_h4_host_disks() {
    let field = "spec.volumes[0].hostDisk";
    let list = |source: Value| volumes(json!([{"name": "a", "hostDisk": source}]));
    let text = format!("{field}.path is required for hostDisk volume");
    refused(
        &list(json!({"path": "", "type": "Disk"})),
        MISSING,
        &format!("{field}.path"),
        &text,
    );
    let text = format!("{field}.type has invalid value 'Block', allowed are 'Disk' or 'DiskOrCreate'");
    refused(
        &list(json!({"path": "/a", "type": "Block"})),
        INVALID,
        &format!("{field}.type"),
        &text,
    );
    let text = format!("{field}.capacity is allowed to pass only with {field}.type equal to 'DiskOrCreate'");
    let source = json!({"path": "/a", "type": "Disk", "capacity": "1Gi"});
    refused(&list(source), INVALID, &format!("{field}.capacity"), &text);
}

fn disk(more: Value) -> [(&'static str, Value); 1] {
    let mut disk = json!({"name": "root"});
    for (name, value) in more.as_object().unwrap() {
        disk[name] = value.clone();
    }
    [("domain/devices/disks", json!([disk]))]
}

#[test]
fn d2_d3_d4_disk_names() {
    let twice = json!([{"name": "root"}, {"name": "root"}]);
    let field = "spec.domain.devices.disks[1].name";
    let text = "spec.domain.devices.disks[1] and spec.domain.devices.disks[0] must not have the same Name.";
    refused(&[("domain/devices/disks", twice)], INVALID, field, text);
    let field = format!("{DISK}.name");
    let text = format!("{DISK}.Name 'other' not found.");
    refused(&disk(json!({"name": "other"})), INVALID, &field, &text);
    let text = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start \
                and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
                '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
    refused(&disk(json!({"name": "Root"})), INVALID, &field, text);
    let list = volumes(json!([{"name": "a_b", "emptyDisk": {"capacity": "1Gi"}}]));
    refused(&list, INVALID, "spec.volumes[0].name", text);
}

#[test]
fn d5_to_d9_targets() {
    let text = format!("{DISK} can only have a single target type defined");
    refused(&disk(json!({"disk": {}, "cdrom": {}})), INVALID, DISK, &text);
    for kind in ["disk", "lun", "cdrom"] {
        let field = format!("{DISK}.{kind}.bus");
        let text =
            format!("{DISK} is set with an unrecognized bus nvme, must be one of: [virtio scsi sata usb]");
        refused(&disk(json!({kind: {"bus": "nvme"}})), INVALID, &field, &text);
        refused(
            &disk(json!({kind: {"bus": "ide"}})),
            INVALID,
            &field,
            "IDE bus is not supported",
        );
    }
    let field = format!("{DISK}.cdrom.bus");
    let text = "Bus type virtio is invalid for CD-ROM device";
    refused(&disk(json!({"cdrom": {"bus": "virtio"}})), INVALID, &field, text);
    let mut changes = disk(json!({"lun": {}})).to_vec();
    changes.push((
        "volumes",
        json!([{"name": "root", "emptyDisk": {"capacity": "1Gi"}}]),
    ));
    let field = format!("{DISK}.lun");
    let text = format!("{field} can only be mapped to a DataVolume or PersistentVolumeClaim volume.");
    refused(&changes, INVALID, &field, &text);
}

#[test]
fn d10_d11_boot_orders() {
    let field = format!("{DISK}.bootOrder");
    let text = format!("{DISK} must have a boot order > 0, if supplied");
    refused(&disk(json!({"bootOrder": 0})), INVALID, &field, &text);
    let changes = [
        ("domain/devices/disks/0/bootOrder", json!(1)),
        (
            "domain/devices/interfaces",
            json!([{"name": "default", "bridge": {}, "bootOrder": 1}]),
        ),
        ("networks", json!([{"name": "default", "pod": {}}])),
    ];
    let field = format!("{NIC}.bootOrder");
    refused(
        &changes,
        INVALID,
        &field,
        &format!("Boot order for {field} already set for a different device."),
    );
}

#[test]
fn d12_d13_serials() {
    let field = format!("{DISK}.serial");
    let text = format!("{DISK} must be made up of the following characters [A-Za-z0-9_.+-], if specified");
    refused(&disk(json!({"serial": "a b"})), INVALID, &field, &text);
    let text = format!("{DISK} must be less than or equal to 256 in length, if specified");
    refused(&disk(json!({"serial": "a".repeat(257)})), INVALID, &field, &text);
}

#[test]
fn d14_io_threads_on_sata() {
    let changes = disk(json!({"disk": {"bus": "sata"}, "dedicatedIOThread": true}));
    refused(
        &changes,
        UNSUPPORTED,
        DISK,
        "IOThreads are not supported for disks on a SATA bus",
    );
}

#[test]
fn d16_d17_d18_modes() {
    let field = format!("{DISK}.cache");
    refused(
        &disk(json!({"cache": "unsafe"})),
        INVALID,
        &field,
        &format!("{field} has invalid value unsafe"),
    );
    let field = format!("{DISK}.io");
    let text = format!("Disk IO mode for {field} is not supported. Supported modes are: native, threads.");
    refused(&disk(json!({"io": "io_uring"})), UNSUPPORTED, &field, &text);
    let field = format!("{DISK}.errorPolicy");
    refused(
        &disk(json!({"errorPolicy": "no"})),
        INVALID,
        &field,
        &format!("{field} has invalid value \"no\""),
    );
}

#[test]
fn d19_block_sizes() {
    let size = |logical: i64, physical: i64| {
        disk(json!({"blockSize": {"custom": {"logical": logical, "physical": physical}}}))
    };
    let field = format!("{DISK}.blockSize");
    let changes = disk(json!({"blockSize": {
        "custom": {"logical": 512, "physical": 512}, "matchVolume": {"enabled": true}}}));
    refused(
        &changes,
        INVALID,
        &field,
        "Block size matching can't be enabled together with a custom value",
    );
    let logical = format!("{field}.custom.logical");
    let physical = format!("{field}.custom.physical");
    let text = "Logical size 4096 must be the same or less than the physical size of 512";
    refused(&size(4096, 512), INVALID, &logical, text);
    let text = "Provided size of 128 is less than the supported minimum size of 512";
    refused(&size(128, 512), INVALID, &logical, text);
    let text = "Provided size of 4194304 is greater than the supported maximum size of 2 MiB";
    refused(&size(512, 4_194_304), INVALID, &physical, text);
    refused(
        &size(513, 4096),
        INVALID,
        &logical,
        "Provided size of 513 is not a power of 2",
    );
}

#[test]
fn d20_read_only_sata() {
    let changes = disk(json!({"disk": {"bus": "sata", "readonly": true}}));
    refused(
        &changes,
        INVALID,
        &format!("{DISK}.disk.bus"),
        "sata hard-disks do not support read-only.",
    );
}

fn network(interfaces: Value, networks: Value) -> [(&'static str, Value); 2] {
    [("domain/devices/interfaces", interfaces), ("networks", networks)]
}

fn nic(more: Value) -> [(&'static str, Value); 2] {
    let mut nic = json!({"name": "default"});
    for (name, value) in more.as_object().unwrap() {
        nic[name] = value.clone();
    }
    network(json!([nic]), json!([{"name": "default", "pod": {}}]))
}

#[test]
fn n2_to_n6_networks() {
    let a = json!([{"name": "a", "bridge": {}}]);
    let text = "Network with name \"a\" already exists, every network must have a unique name";
    let twice = json!([{"name": "a", "pod": {}}, {"name": "a", "pod": {}}]);
    refused(
        &network(a.clone(), twice),
        DUPLICATE,
        "spec.networks[1].name",
        text,
    );
    let unused = json!([{"name": "b", "pod": {}}]);
    let field = "spec.networks[0].name";
    refused(
        &network(a.clone(), unused),
        REQUIRED,
        field,
        "spec.networks[0].name 'b' not found.",
    );
    let field = "spec.networks[0]";
    refused(
        &network(a.clone(), json!([{"name": "a"}])),
        REQUIRED,
        field,
        "should have a network type",
    );
    let both = json!([{"name": "a", "pod": {}, "multus": {"networkName": "x"}}]);
    refused(
        &network(a.clone(), both),
        REQUIRED,
        field,
        "should have only one network type",
    );
    let nameless = json!([{"name": "a", "multus": {"networkName": ""}}]);
    refused(
        &network(a, nameless),
        REQUIRED,
        field,
        "CNI delegating plugin must have a networkName",
    );
    let two = json!([{"name": "a", "bridge": {}}, {"name": "b", "bridge": {}}]);
    let multus = |name: &str| json!({"name": name, "multus": {"networkName": name, "default": true}});
    let text = "Pod network cannot be defined when Multus default network is defined";
    let networks = json!([multus("a"), {"name": "b", "pod": {}}]);
    refused(&network(two.clone(), networks), INVALID, "spec.networks", text);
    let text = "Multus CNI should only have one default network";
    refused(
        &network(two, json!([multus("a"), multus("b")])),
        INVALID,
        "spec.networks",
        text,
    );
}

#[test]
fn i2_to_i6_interfaces() {
    let field = format!("{NIC}.name");
    let networks = json!([{"name": "default", "pod": {}}]);
    let changes = network(json!([{"name": "x", "bridge": {}}]), networks.clone());
    refused(&changes, INVALID, &field, &format!("{field} 'x' not found."));
    let text = "Only one interface can be connected to one specific network";
    let twice = json!([{"name": "default", "bridge": {}}, {"name": "default", "bridge": {}}]);
    refused(
        &network(twice, networks),
        DUPLICATE,
        "spec.domain.devices.interfaces[1].name",
        text,
    );
    let text = "Network interface name can only contain alphabetical characters, numbers, dashes (-) or underscores (_)";
    refused(
        &network(
            json!([{"name": "d.efault"}]),
            json!([{"name": "d.efault", "pod": {}}]),
        ),
        INVALID,
        &field,
        text,
    );
    let text = "more than one interface is connected to a pod network in spec.interfaces";
    let two = json!([{"name": "a", "bridge": {}}, {"name": "b", "bridge": {}}]);
    let pods = json!([{"name": "a", "pod": {}}, {"name": "b", "pod": {}}]);
    refused(&network(two, pods), DUPLICATE, "spec.interfaces", text);
    let multus = json!([{"name": "a", "multus": {"networkName": "x"}}]);
    let text = "Masquerade interface only implemented with pod network";
    refused(
        &network(json!([{"name": "a", "masquerade": {}}]), multus),
        INVALID,
        &field,
        text,
    );
}

#[test]
fn i7_i8_i12_i13_i14_interface_settings() {
    let field = format!("{NIC}.macAddress");
    let text = "The requested MAC address is reserved for the in-pod bridge. Please choose another one.";
    refused(
        &nic(json!({"masquerade": {}, "macAddress": "02:00:00:00:00:00"})),
        INVALID,
        &field,
        text,
    );
    let text = format!("interface {NIC}.name has malformed MAC address (de:ad:be:af).");
    refused(&nic(json!({"macAddress": "de:ad:be:af"})), INVALID, &field, &text);
    let text = format!("interface {NIC}.name has MAC address (de-ad-00-00-be-af-be-af) that is too long.");
    refused(
        &nic(json!({"macAddress": "de-ad-00-00-be-af-be-af"})),
        INVALID,
        &field,
        &text,
    );
    let text = format!("interface {NIC}.name uses model vmxnet3 that is not supported.");
    refused(
        &nic(json!({"model": "vmxnet3"})),
        UNSUPPORTED,
        &format!("{NIC}.model"),
        &text,
    );
    let field = format!("{NIC}.state");
    let text = "logical default interface state value is unsupported: gone";
    refused(&nic(json!({"state": "gone"})), INVALID, &field, text);
    let text = "\"default\" interface's state \"absent\" is supported only for bridge binding";
    refused(
        &nic(json!({"masquerade": {}, "state": "absent"})),
        INVALID,
        &field,
        text,
    );
    let options = |options: Value| nic(json!({"dhcpOptions": options}));
    refused(
        &options(json!({"ntpServers": ["127.0.0.1", "::1"]})),
        INVALID,
        &format!("{NIC}.dhcpOptions.ntpServers[1]"),
        "NTP servers must be a list of valid IPv4 addresses.",
    );
    let field = format!("{NIC}.dhcpOptions.privateOptions");
    let text = "provided DHCPPrivateOptions are out of range, must be in range 224 to 254";
    refused(
        &options(json!({"privateOptions": [{"option": 223, "value": "x"}]})),
        INVALID,
        &field,
        text,
    );
    let twice = json!([{"option": 240, "value": "x"}, {"option": 240, "value": "y"}]);
    let text = "Found Duplicates: you have provided duplicate DHCPPrivateOptions";
    refused(&options(json!({"privateOptions": twice})), INVALID, &field, text);
    assert_eq!(
        faults(&with(&nic(
            json!({"bridge": {}, "macAddress": "de-ad-00-00-be-af"})
        ))),
        []
    );
    assert_eq!(
        faults(&with(&nic(json!({"bridge": {}, "macAddress": "dead.0000.beaf"})))),
        []
    );
}

#[test]
fn r1_to_r4_ports() {
    let ports = |ports: Value| nic(json!({"masquerade": {}, "ports": ports}));
    let field = format!("{NIC}.ports[0]");
    refused(
        &ports(json!([{"port": 0}])),
        REQUIRED,
        &field,
        "Port field is mandatory.",
    );
    let text = "Port field must be in range 0 < x < 65536.";
    refused(&ports(json!([{"port": 65537}])), INVALID, &field, text);
    refused(&ports(json!([{"port": -1}])), INVALID, &field, text);
    let text = "Unknown protocol, only TCP or UDP allowed";
    refused(
        &ports(json!([{"port": 1, "protocol": "SCTP"}])),
        INVALID,
        &format!("{field}.protocol"),
        text,
    );
    let twice = json!([{"port": 1, "name": "http"}, {"port": 2, "name": "http"}]);
    let second = format!("{NIC}.ports[1].name");
    refused(
        &ports(twice),
        DUPLICATE,
        &second,
        "Duplicate name of the port: http",
    );
    let text = "Invalid name of the port: Http";
    refused(
        &ports(json!([{"port": 1, "name": "Http"}])),
        INVALID,
        &format!("{field}.name"),
        text,
    );
}

#[test]
fn f1_f2_f3_firmware() {
    let text =
        "spec.domain has EFI SecureBoot enabled. SecureBoot requires SMM, which is currently disabled.";
    refused(
        &[("domain/firmware/bootloader/efi", json!({}))],
        INVALID,
        "spec.domain",
        text,
    );
    let field = "spec.domain.firmware.bootloader";
    let text = format!("{field} has both EFI and BIOS configured, but they are mutually exclusive.");
    let changes = [(
        "domain/firmware/bootloader",
        json!({"efi": {"secureBoot": false}, "bios": {}}),
    )];
    refused(&changes, INVALID, field, &text);
    let field = "spec.domain.firmware.serial";
    let text = format!("{field} must be less than or equal to 256 in length, if specified");
    refused(
        &[("domain/firmware/serial", json!("a".repeat(257)))],
        INVALID,
        field,
        &text,
    );
    let text = format!("{field} must be made up of the following characters [A-Za-z0-9_.+-], if specified");
    refused(
        &[("domain/firmware/serial", json!("$$$$"))],
        INVALID,
        field,
        &text,
    );
    let field = "spec.domain.firmware.uuid";
    refused(
        &[("domain/firmware/uuid", json!("nope"))],
        INVALID,
        field,
        &format!("{field} 'nope' is not a UUID"),
    );
}

#[test]
fn k1_to_k4_kernel_boot() {
    let boot = |boot: Value| [("domain/firmware/kernelBoot", boot)];
    let path = "spec.domain.firmware.kernelBoot";
    let text = "kernel arguments cannot be provided without an external kernel";
    refused(
        &boot(json!({"kernelArgs": "a"})),
        INVALID,
        &format!("{path}.kernelArgs"),
        text,
    );
    let path = format!("{path}.container");
    let text = format!("{path} must be defined with an image");
    refused(
        &boot(json!({"container": {"kernelPath": "/k"}})),
        REQUIRED,
        &format!("{path}.image"),
        &text,
    );
    let text = format!("{path} must be defined with at least one of the following: kernelPath, initrdPath");
    refused(
        &boot(json!({"container": {"image": "i"}})),
        REQUIRED,
        &path,
        &text,
    );
    for name in ["kernelPath", "initrdPath"] {
        let field = format!("{path}.{name}");
        let text = format!("{field} must be an absolute path to a file without relative components");
        refused(
            &boot(json!({"container": {"image": "i", name: "/a/../k"}})),
            INVALID,
            &field,
            &text,
        );
        let text = format!("{field} must not point to root");
        refused(
            &boot(json!({"container": {"image": "i", name: "/"}})),
            INVALID,
            &field,
            &text,
        );
    }
}

#[test]
fn a1_a2_a3_names() {
    let field = "spec.domain.machine.type";
    let text = format!("{field} is not supported: pc-i440fx (allowed values: [q35* pc-q35*])");
    refused(
        &[("domain/machine/type", json!("pc-i440fx"))],
        INVALID,
        field,
        &text,
    );
    let text = "spec.hostname does not conform to the kubernetes DNS_LABEL rules : must be no more than 63 characters";
    refused(
        &[("hostname", json!("a".repeat(64)))],
        INVALID,
        "spec.hostname",
        text,
    );
    let faults = faults(&with(&[("subdomain", json!("bad_name"))]));
    assert_eq!(faults[0].field, "spec.subdomain");
    assert!(
        faults[0].message.starts_with(
            "spec.subdomain does not conform to the kubernetes DNS_SUBDOMAIN rules : a lowercase"
        )
    );
}

#[test]
fn a5_a6_a7_policies_and_inputs() {
    let changes = [("domain/ioThreadsPolicy", json!("bogus"))];
    refused(
        &changes,
        INVALID,
        "spec.domain.ioThreadsPolicy",
        "Invalid IOThreadsPolicy (bogus)",
    );
    let inputs = |input: Value| [("domain/devices/inputs", json!([input]))];
    let path = "spec.domain.devices.inputs[0]";
    let text = "Input device can have only virtio or usb bus.";
    refused(
        &inputs(json!({"name": "a", "type": "tablet", "bus": "ps2"})),
        INVALID,
        &format!("{path}.bus"),
        text,
    );
    let text = "Input device can have only tablet type.";
    refused(
        &inputs(json!({"name": "a", "type": "keyboard"})),
        INVALID,
        &format!("{path}.type"),
        text,
    );
}

#[test]
fn a9_a10_strategies() {
    let text = "spec.evictionStrategy is set with an unrecognized option: fantasy";
    refused(
        &[("evictionStrategy", json!("fantasy"))],
        INVALID,
        "spec.evictionStrategy",
        text,
    );
    let text = "spec.startStrategy is set with an unrecognized option: invalid";
    refused(
        &[("startStrategy", json!("invalid"))],
        INVALID,
        "spec.startStrategy",
        text,
    );
    let changes = [
        ("startStrategy", json!("Paused")),
        ("livenessProbe", json!({"exec": {"command": ["true"]}})),
    ];
    let text = "either spec.startStrategy or spec.livenessProbe should be provided.Pausing VMI with LivenessProbe is \
                not supported";
    refused(&changes, INVALID, "spec.startStrategy", text);
}

#[test]
fn b1_b2_b3_probes() {
    for name in ["livenessProbe", "readinessProbe"] {
        let field = format!("spec.{name}");
        let probe = json!({"exec": {"command": []}, "tcpSocket": {"port": 1}});
        refused(
            &[(name, probe)],
            INVALID,
            &field,
            &format!("{field} must have exactly one probe type set"),
        );
        let text = format!(
            "either {field}.tcpSocket, {field}.exec or {field}.httpGet must be set if a {field} is specified"
        );
        refused(&[(name, json!({"periodSeconds": 3}))], REQUIRED, &field, &text);
        for kind in ["httpGet", "tcpSocket"] {
            let changes = [
                (name, json!({kind: {"port": 80}})),
                ("domain/devices/autoattachPodInterface", json!(false)),
            ];
            let field = format!("{field}.{kind}");
            refused(
                &changes,
                INVALID,
                &field,
                &format!("{field} is only allowed if the Pod Network is attached"),
            );
        }
    }
}

#[test]
fn x2_annotations() {
    let mut manifest = with(&[]);
    manifest["metadata"]["annotations"] = json!({"hooks.kubevirt.io/hookSidecars": "[]"});
    let faults = faults(&manifest);
    assert_eq!(faults[0].field, "metadata.annotations");
    assert_eq!(
        faults[0].message,
        "sidecar feature gate is not enabled in kubevirt-config, invalid entry \
         metadata.annotations.hooks.kubevirt.io/hookSidecars"
    );
}

#[test]
fn w1_run_strategies() {
    let vm = |spec: Value| {
        let mut spec = spec;
        spec["template"] = json!({"spec": with(&[])["spec"]});
        faults(&json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a"}, "spec": spec}))
            .into_iter()
            .map(|fault| fault.message)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        vm(json!({"running": true, "runStrategy": "Always"})),
        ["Running and RunStrategy are mutually exclusive"]
    );
    assert_eq!(vm(json!({})), ["One of Running or RunStrategy must be specified"]);
    assert_eq!(
        vm(json!({"runStrategy": "Sometimes"})),
        ["Invalid RunStrategy (Sometimes)"]
    );
    assert_eq!(vm(json!({"runStrategy": "Halted"})), Vec::<String>::new());
}
