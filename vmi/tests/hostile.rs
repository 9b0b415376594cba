//! No manifest makes loading, validating or planning panic.

mod common;

use common::base;
use husk_vmi::{Loaded, PodResources, VmPlan, load, plan, validate};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Words that get past the first checks.
const WORDS: &[&str] = &[
    "",
    "root",
    "virtio",
    "sata",
    "scsi",
    "1Gi",
    "-1",
    "8E",
    "0.5",
    "2Mi",
    "/",
    "/disk/a",
    "../a",
    "none",
    "Paused",
    "a\u{0}b",
    "DiskOrCreate",
    "Disk",
    "stop",
    "auto",
    "open",
    "5d307ca9-b3ef-428c-8861-06e72d69f223",
    "YQ==",
    "\n",
    "é",
    "Europe/Berlin",
    "default",
    "02:00:00:00:00:00",
    "0a:58:0a:f4:01:05",
    "10.0.2.0/24",
    "0.0.0.0/0",
    "fd10:0:2::/120",
    "absent",
    "down",
    "e1000",
    "UDP",
    "10.0.0.1",
];

/// Names of fields that exist.
const FIELDS: &[&str] = &[
    "domain",
    "devices",
    "disks",
    "volumes",
    "name",
    "disk",
    "bus",
    "cpu",
    "cores",
    "sockets",
    "threads",
    "memory",
    "guest",
    "hugepages",
    "pageSize",
    "resources",
    "requests",
    "limits",
    "firmware",
    "kernelBoot",
    "kernelArgs",
    "container",
    "image",
    "kernelPath",
    "clock",
    "utc",
    "offsetSeconds",
    "timezone",
    "features",
    "acpi",
    "enabled",
    "interfaces",
    "networks",
    "pod",
    "bridge",
    "ports",
    "port",
    "bootOrder",
    "serial",
    "cloudInitNoCloud",
    "userData",
    "userDataBase64",
    "emptyDisk",
    "capacity",
    "hostDisk",
    "path",
    "type",
    "containerDisk",
    "persistentVolumeClaim",
    "blockSize",
    "matchVolume",
    "cdrom",
    "lun",
    "tray",
    "readonly",
    "shareable",
    "cache",
    "errorPolicy",
    "dedicatedIOThread",
    "ioThreadsPolicy",
    "blockMultiQueue",
    "configMap",
    "volumeLabel",
    "optional",
    "ephemeral",
    "cloudInitConfigDrive",
    "secretRef",
    "discardGranularity",
    "custom",
    "logical",
    "physical",
    "macAddress",
    "masquerade",
    "multus",
    "networkName",
    "vmNetworkCIDR",
    "vmIPv6NetworkCIDR",
    "protocol",
    "state",
    "dhcpOptions",
    "ntpServers",
    "privateOptions",
    "option",
    "value",
    "networkInterfaceMultiqueue",
    "autoattachPodInterface",
    "subdomain",
    "dnsPolicy",
    "dnsConfig",
    "nameservers",
    "searches",
    "model",
    "hostname",
    "startStrategy",
    "livenessProbe",
    "httpGet",
    "uuid",
    "template",
    "spec",
    "running",
];

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-2i64..600).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(WORDS).prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 48, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((prop::sample::select(FIELDS), inner), 0..6).prop_map(|fields| {
                Value::Object(
                    fields
                        .into_iter()
                        .map(|(k, v)| (k.to_owned(), v))
                        .collect::<Map<_, _>>(),
                )
            }),
        ]
    })
}

/// Every path to a value in a document, as steps.
fn paths(value: &Value, at: &str, into: &mut Vec<String>) {
    into.push(at.to_owned());
    match value {
        Value::Object(map) => map
            .iter()
            .for_each(|(name, value)| paths(value, &format!("{at}/{name}"), into)),
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(i, value)| paths(value, &format!("{at}/{i}"), into));
        }
        _ => {}
    }
}

/// A manifest that uses most of what is supported.
fn rich() -> Value {
    let mut manifest = base();
    manifest["spec"] = json!({
        "terminationGracePeriodSeconds": 5, "hostname": "h", "startStrategy": "Paused", "architecture": "amd64",
        "domain": {
            "cpu": {"cores": 2, "sockets": 1, "threads": 1, "model": "host-model", "features": [{"name": "a", "policy": "force"}]},
            "memory": {"guest": "64Mi", "hugepages": {"pageSize": "2Mi"}},
            "resources": {"requests": {"memory": "64Mi", "cpu": 1}, "limits": {"memory": "64Mi"}},
            "clock": {"timezone": "UTC", "utc": {"offsetSeconds": 1}},
            "firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223", "serial": "s",
                "kernelBoot": {"kernelArgs": "a", "container": {"image": "i", "kernelPath": "/k", "initrdPath": "/i"}}},
            "features": {"acpi": {"enabled": true}, "smm": {"enabled": false}},
            "devices": {
                "rng": {},
                "disks": [
                    {"name": "root", "bootOrder": 1, "serial": "s", "cache": "none", "io": "native", "disk": {"bus": "virtio"},
                     "blockSize": {"custom": {"logical": 512, "physical": 512}}},
                    {"name": "seed", "disk": {}},
                    {"name": "empty-drive", "cdrom": {"bus": "sata", "tray": "open"}},
                    {"name": "files", "cdrom": {"bus": "scsi"}},
                    {"name": "claim", "lun": {"bus": "scsi", "readonly": true}, "errorPolicy": "ignore"},
                    {"name": "over", "disk": {"bus": "scsi"}, "blockSize": {"matchVolume": {}}, "shareable": true},
                ],
                "networkInterfaceMultiqueue": true,
                "interfaces": [
                    {"name": "default", "masquerade": {}, "macAddress": "02:00:00:00:00:01", "ports": [{"port": 80, "protocol": "UDP"}],
                     "dhcpOptions": {"bootFileName": "b", "tftpServerName": "t", "ntpServers": ["10.0.0.1"],
                         "privateOptions": [{"option": 224, "value": "v"}]}},
                    {"name": "more", "bridge": {}, "model": "e1000", "state": "down"},
                    {"name": "none", "bridge": {}, "state": "absent"},
                ],
            },
        },
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["::1"], "searches": ["a.b"], "options": [{"name": "n", "value": "v"}]},
        "networks": [
            {"name": "default", "pod": {"vmNetworkCIDR": "10.0.2.0/24", "vmIPv6NetworkCIDR": "fd10:0:2::/120"}},
            {"name": "more", "multus": {"networkName": "ns/net"}},
            {"name": "none", "multus": {"networkName": "net"}},
        ],
        "volumes": [
            {"name": "root", "containerDisk": {"image": "i", "path": "/disk/a"}},
            {"name": "seed", "cloudInitNoCloud": {"userDataBase64": "YQ==", "networkData": "n"}},
            {"name": "empty", "emptyDisk": {"capacity": "1Gi"}},
            {"name": "host", "hostDisk": {"path": "/h", "type": "DiskOrCreate", "capacity": "1Gi"}},
            {"name": "files", "configMap": {"name": "c", "volumeLabel": "l"}},
            {"name": "claim", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "over", "ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}},
            {"name": "drive", "cloudInitConfigDrive": {"secretRef": {"name": "s"}, "networkData": "n"}},
        ],
    });
    manifest
}

fn exercise(text: &str) {
    let documents = match load(text) {
        Ok(documents) => documents,
        Err(error) => {
            assert!(error.to_string().lines().all(|line| line.len() < 4000));
            return;
        }
    };
    for document in documents {
        let Loaded::Vmi(vmi) = document else { continue };
        let valid = validate(&vmi);
        if let Err(errors) = &valid {
            assert!(!errors.is_empty());
            assert!(errors.iter().all(|error| !error.to_string().contains('\n')));
        }
        let names = ["root", "kernel-boot-volume", "files", "claim", "over", "drive"];
        let names = names
            .into_iter()
            .filter(|name| vmi.spec.volume(name).is_some() || *name == "kernel-boot-volume");
        let volumes = names.map(|name| (name.to_owned(), "/x".into()));
        let resources = PodResources {
            volumes: volumes.collect(),
            ..PodResources::default()
        };
        match plan(&vmi, &resources) {
            Ok(plan) => {
                assert!(valid.is_ok());
                assert!((1..=254).contains(&plan.topology.vcpus()));
                assert!(plan.memory.guest_bytes >= 16 << 20 && plan.memory.guest_bytes % 4096 == 0);
                let targets: std::collections::HashSet<_> =
                    plan.disks.iter().map(|disk| &disk.target).collect();
                assert_eq!(targets.len(), plan.disks.len());
                let nics: std::collections::HashSet<_> = plan.nics.iter().map(|nic| &nic.name).collect();
                assert_eq!(nics.len(), plan.nics.len());
                assert!(plan.nics.iter().all(|nic| (1..=256).contains(&nic.queues)));
                assert!(plan.nics.len() + plan.disks.iter().filter(|disk| !disk.is_scsi()).count() < 31);
                assert!(!plan.hostname.is_empty() && plan.hostname.len() <= 63);
                let text = serde_json::to_string(&plan).unwrap();
                assert_eq!(serde_json::from_str::<VmPlan>(&text).unwrap(), plan);
            }
            Err(errors) => assert!(!errors.is_empty()),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_document(document in value()) {
        exercise(&document.to_string());
    }

    #[test]
    fn any_spec(spec in value(), vm in any::<bool>()) {
        let mut manifest = base();
        if vm {
            manifest["kind"] = json!("VirtualMachine");
        }
        manifest["spec"] = spec;
        exercise(&manifest.to_string());
    }

    #[test]
    fn a_rich_manifest_with_values_replaced(
        changes in prop::collection::vec((any::<prop::sample::Index>(), value()), 1..4),
    ) {
        let mut manifest = rich();
        for (index, value) in changes {
            let mut all = Vec::new();
            paths(&manifest["spec"], "/spec", &mut all);
            if let Some(target) = manifest.pointer_mut(index.get::<String>(&all)) {
                *target = value;
            }
        }
        exercise(&manifest.to_string());
    }

    #[test]
    fn any_text(text in "(\\PC|[\n:{}\\[\\]&*!|>#\"' -]){0,60}") {
        exercise(&text);
        exercise(&format!("{}\n---\n{text}", base()));
    }
}

#[test]
fn the_rich_manifest_is_almost_valid() {
    let Loaded::Vmi(vmi) = load(&rich().to_string()).unwrap().remove(0) else {
        panic!()
    };
    let faults: Vec<String> = validate(&vmi)
        .unwrap_err()
        .into_iter()
        .map(|fault| fault.field)
        .collect();
    assert_eq!(faults, ["spec.domain.cpu.features"]);
    let mut manifest = rich();
    manifest["spec"]["domain"]["cpu"]["features"] = json!([]);
    exercise(&manifest.to_string());
}
