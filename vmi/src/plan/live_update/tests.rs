use serde_json::{Value, json};

use super::*;
use crate::plan::hotplug::PlugPlan;
use crate::{CacheMode, Loaded, load};

/// A VMI with a disk on a claim, one that is hotpluggable, and two interfaces; `change` is a merge patch.
fn vmi(change: Value) -> Vmi {
    let mut manifest = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "demo", "uid": "u-1"},
        "spec": {
            "domain": {
                "cpu": {"cores": 2},
                "memory": {"guest": "128Mi"},
                "devices": {
                    "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                    "interfaces": [{"name": "default", "masquerade": {}}],
                },
            },
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [
                {"name": "root", "persistentVolumeClaim": {"claimName": "root"}},
                {"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config"}},
            ],
        },
    });
    merge(&mut manifest, change);
    match load(&manifest.to_string()).unwrap().remove(0) {
        Loaded::Vmi(vmi) => *vmi,
        other => panic!("{other:?}"),
    }
}

fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (name, value) in change {
                merge(into.entry(name).or_insert(Value::Null), value);
            }
        }
        (into, change) => *into = change,
    }
}

fn running() -> VmPlan {
    let mut resources = PodResources::default();
    resources.volumes.insert("root".into(), "/root.img".into());
    plan(&vmi(json!({})), &resources).unwrap()
}

fn live(change: Value) -> Result<LiveUpdate, String> {
    whole(&running(), &vmi(change))
        .map_err(|errors| errors.iter().map(|error| format!("{error}\n")).collect())
}

/// The changes, if none requires a restart.
fn whole(running: &VmPlan, vmi: &Vmi) -> Result<LiveUpdate, Vec<FieldError>> {
    let live = running.live(vmi)?;
    match live.restart_required.is_empty() {
        true => Ok(live),
        false => Err(live.restart_required),
    }
}

fn volumes(more: Value) -> Value {
    let spec = vmi(json!({})).spec;
    assert_eq!(spec.volumes.len(), 2);
    json!({"spec": {"volumes": [
        {"name": "root", "persistentVolumeClaim": {"claimName": "root"}},
        {"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config"}},
        more,
    ]}})
}

#[test]
fn the_vmi_it_was_started_from_wants_nothing() {
    let planned = InterfaceUpdate::Planned {
        name: "default".into(),
        link_up: true,
    };
    let wanted = LiveUpdate {
        volumes: Vec::new(),
        interfaces: vec![planned],
        restart_required: Vec::new(),
    };
    assert_eq!(live(json!({})).unwrap(), wanted);
    // Labels are nobody's business here, nor is a UID that one side does not know.
    let change = json!({"metadata": {"labels": {"a": "b"}, "uid": null}});
    assert_eq!(live(change).unwrap(), wanted);
}

#[test]
fn changes_that_need_a_restart_are_refused_by_field() {
    for (change, field) in [
        (json!({"metadata": {"name": "other"}}), "metadata.name"),
        (json!({"metadata": {"namespace": "other"}}), "metadata.namespace"),
        (json!({"metadata": {"uid": "u-2"}}), "metadata.uid"),
        (
            json!({"spec": {"domain": {"cpu": {"cores": 4}}}}),
            "spec.domain.cpu",
        ),
        (
            json!({"spec": {"domain": {"memory": {"guest": "256Mi"}}}}),
            "spec.domain.memory.guest",
        ),
        (json!({"spec": {"subdomain": "x"}}), "spec.subdomain"),
        (
            json!({"spec": {"domain": {"firmware": {"serial": "x"}}}}),
            "spec.domain.firmware.serial",
        ),
        (
            json!({"spec": {"domain": {"devices": {"rng": {}}}}}),
            "spec.domain.devices.rng",
        ),
        (
            json!({"spec": {"domain": {"devices": {"watchdog": {"name": "w"}}}}}),
            "spec.domain.devices.watchdog",
        ),
        (
            json!({"spec": {"domain": {"devices": {"downwardMetrics": {}}}}}),
            "spec.domain.devices.downwardMetrics",
        ),
        (
            json!({"spec": {"terminationGracePeriodSeconds": 7}}),
            "spec.terminationGracePeriodSeconds",
        ),
        (
            json!({"spec": {"domain": {"devices": {"disks": [
                {"name": "root", "disk": {"bus": "virtio"}, "serial": "x"}]}}}}),
            "spec.domain.devices.disks[0]",
        ),
        (
            json!({"spec": {"volumes": [
                {"name": "root", "persistentVolumeClaim": {"claimName": "other"}},
                {"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config"}}]}}),
            "spec.domain.devices.disks[0]",
        ),
        (
            json!({"spec": {"volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "root"}}]}}),
            "spec.domain.devices.disks",
        ),
        (
            volumes(json!({"name": "more", "emptyDisk": {"capacity": "1Gi"}})),
            "spec.volumes[2]",
        ),
        (
            json!({"spec": {"domain": {"devices": {"interfaces": [{"name": "default", "bridge": {}}]}}}}),
            "spec.domain.devices.interfaces[0]",
        ),
        (
            json!({"spec": {"domain": {"devices": {"interfaces": [
                {"name": "default", "masquerade": {}, "macAddress": "02:00:00:00:00:07"}]}}}}),
            "spec.domain.devices.interfaces[0]",
        ),
        (
            json!({"spec": {"networks": [{"name": "red", "multus": {"networkName": "red"}}],
                "domain": {"devices": {"interfaces": [{"name": "red", "bridge": {}}]}}}}),
            "spec.domain.devices.interfaces",
        ),
    ] {
        let said = live(change.clone()).unwrap_err();
        assert!(
            said.starts_with(&format!("{field}: ")) && said.lines().count() == 1,
            "{change}: {said}"
        );
    }
    // What no VMI may be is said in KubeVirt's words.
    let said = live(json!({"spec": {"domain": {"devices": {"disks": [{"name": "no"}]}}}})).unwrap_err();
    assert!(
        said.contains("spec.domain.devices.disks[0].Name 'no' not found."),
        "{said}"
    );
}

#[test]
fn queues_that_follow_from_the_vcpus_are_no_further_change() {
    let disk = |name: String| json!({"name": name, "disk": {"bus": "virtio"}});
    let of = |cores: u32, multiqueue: bool| {
        let names = (0..5).map(|i| format!("d{i}"));
        let disks = names.clone().map(disk).collect::<Vec<_>>();
        let volumes = names.map(|name| json!({"name": name, "emptyDisk": {"capacity": "1Mi"}}));
        vmi(json!({"spec": {"domain": {
            "cpu": {"cores": cores},
            "ioThreadsPolicy": "auto",
            "devices": {
                "disks": disks, "blockMultiQueue": multiqueue, "networkInterfaceMultiqueue": multiqueue,
            },
        }, "volumes": volumes.collect::<Vec<_>>()}}))
    };
    let running = plan(&of(1, true), &PodResources::default()).unwrap();
    let fields = |wanted: &Vmi| {
        let errors = running.live(wanted).unwrap().restart_required;
        errors.into_iter().map(|error| error.field).collect::<Vec<_>>()
    };
    assert_eq!(fields(&of(2, true)), ["spec.domain.cpu"]);
    let running = plan(&of(2, true), &PodResources::default()).unwrap();
    let without = running.live(&of(2, false)).unwrap().restart_required;
    assert!(without.len() > 1, "{without:?}");
}

#[test]
fn other_changes_go_beside_those_that_need_a_restart() {
    let mut change = volumes(json!({"name": "data", "dataVolume": {"name": "dv", "hotpluggable": true}}));
    change["spec"]["domain"] = json!({
        "cpu": {"cores": 4},
        "devices": {"interfaces": [{"name": "default", "masquerade": {}, "state": "down"}]},
    });
    let found = running().live(&vmi(change)).unwrap();
    assert_eq!(found.volumes.len(), 1);
    let down = InterfaceUpdate::Planned {
        name: "default".into(),
        link_up: false,
    };
    assert_eq!(found.interfaces, [down]);
    let fields: Vec<&str> = found
        .restart_required
        .iter()
        .map(|error| error.field.as_str())
        .collect();
    assert_eq!(fields, ["spec.domain.cpu"]);
}

#[test]
fn another_kind_of_volume_needs_a_restart() {
    let secret = |name: &str| json!({"name": "seed", "cloudInitNoCloud": {"secretRef": {"name": name}}});
    let inline = json!({"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config"}});
    let both = json!({"name": "seed", "cloudInitNoCloud": {
        "userData": "#cloud-config", "networkDataSecretRef": {"name": "net"}}});
    let files = |kind: &str, field: &str| json!({"name": "seed", kind: {field: "a"}});
    let claim = json!({"name": "seed", "persistentVolumeClaim": {"claimName": "a"}});
    let empty = json!({"name": "seed", "emptyDisk": {"capacity": "1Gi"}});
    let volumes = [
        secret("a"),
        inline,
        both,
        files("configMap", "name"),
        files("secret", "secretName"),
        claim,
        empty,
        json!({"name": "seed", "containerDisk": {"image": "a"}}),
        json!({"name": "seed", "hostDisk": {"path": "/a", "type": "Disk"}}),
    ];
    let of = |volume: &Value| {
        vmi(json!({"spec": {"volumes": [
            {"name": "root", "persistentVolumeClaim": {"claimName": "root"}}, volume]}}))
    };
    for was in &volumes {
        let needs_data = |resources: &PodResources| plan(&of(was), resources);
        let mut resources = PodResources::default();
        resources.volumes.insert("root".into(), "/root.img".into());
        let running = needs_data(&resources).or_else(|_| {
            resources.volumes.insert("seed".into(), "/seed".into());
            needs_data(&resources)
        });
        let running = running.unwrap();
        for volume in &volumes {
            let mut wanted = of(volume);
            wanted.spec.subdomain = Some("x".into());
            let found = running.live(&wanted).unwrap().restart_required;
            let mut expected = vec![
                "spec.subdomain: Invalid value: the subdomain cannot be changed from '' to 'x' \
                                     while the VM runs",
            ];
            if was != volume {
                expected.push(
                    "spec.volumes[1]: Invalid value: the disk \"seed\" and its volume cannot be changed while the VM \
                     runs: restart the VM",
                );
            }
            let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
            assert_eq!(lines, expected, "{was} to {volume}");
        }
    }
}

#[test]
fn disks_know_that_their_claims_are_preallocated() {
    let more = json!({"name": "data", "dataVolume": {"name": "dv", "hotpluggable": true}});
    let status = |preallocated: bool| {
        let entry = |name| json!({"name": name, "persistentVolumeClaimInfo": {"preallocated": preallocated}});
        let mut change = volumes(more.clone());
        change["status"] = json!({"volumeStatus": [entry("root"), entry("data")]});
        change
    };
    let mut vm = running();
    assert!(!vm.disks[0].preallocated);
    // A running disk stays as it was.
    let volume = live(status(true)).unwrap().volumes.remove(0);
    assert!(volume.preallocated);
    let source = DiskSource::File("/data.img".into());
    let volume = NewVolume { source, ..volume };
    let PlugPlan::New(disk) = vm.plug(&volume).unwrap() else {
        panic!("it is new")
    };
    assert!(disk.preallocated);
    vm.disks.push(*disk);
    let sparse = NewVolume {
        preallocated: false,
        ..volume
    };
    assert!(matches!(vm.plug(&sparse), Ok(PlugPlan::Present(disk)) if disk.preallocated));

    let mut resources = PodResources::default();
    resources.volumes.insert("root".into(), "/root.img".into());
    let vm = plan(&vmi(json!({"status": status(true)["status"]})), &resources).unwrap();
    assert!(vm.disks[0].preallocated && !vm.disks[1].preallocated);
}

#[test]
fn hotpluggable_volumes_have_the_settings_of_their_disks() {
    let more = json!({"name": "data", "dataVolume": {"name": "dv", "hotpluggable": true}});
    let wanted = NewVolume {
        name: "data".into(),
        origin: Some("dataVolume/dv".into()),
        ..NewVolume::default()
    };
    assert_eq!(live(volumes(more)).unwrap().volumes, [wanted]);

    let more = json!({"name": "data",
        "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true, "readOnly": true}});
    let mut change = volumes(more);
    let disks = json!([
        {"name": "data", "disk": {"bus": "scsi"}, "serial": "S", "shareable": true, "errorPolicy": "report"},
        {"name": "root", "disk": {"bus": "virtio"}},
    ]);
    change["spec"]["domain"] = json!({"devices": {"disks": disks}});
    let found = live(change.clone()).unwrap().volumes.remove(0);
    assert_eq!(
        (found.serial.as_str(), found.read_only, found.shareable),
        ("S", true, true)
    );
    assert_eq!(
        (found.cache, found.error_policy),
        (CacheMode::None, crate::ErrorPolicy::Report)
    );

    // There is no other bus to plug it into.
    change["spec"]["domain"]["devices"]["disks"][0]["disk"]["bus"] = json!("virtio");
    assert_eq!(live(change.clone()).unwrap().volumes, [found]);

    for (disk, field) in [(json!({"bus": "scsi"}), "lun"), (json!({"bus": "scsi"}), "cdrom")] {
        let kind = field.split('.').next().unwrap();
        let mut change = change.clone();
        change["spec"]["domain"]["devices"]["disks"][0] = json!({"name": "data", kind: disk});
        // The other changes are made.
        let live = running().live(&vmi(change)).unwrap();
        let refused = &live.restart_required[0].field;
        assert_eq!(*refused, format!("spec.domain.devices.disks[0].{field}"));
        assert_eq!(live.volumes, []);
    }
}

#[test]
fn a_hotpluggable_volume_that_was_there_at_the_start_is_a_part_of_the_vm() {
    let first = vmi(volumes(
        json!({"name": "data", "dataVolume": {"name": "dv", "hotpluggable": true}}),
    ));
    let mut resources = PodResources::default();
    for name in ["root", "data"] {
        resources.volumes.insert(name.into(), format!("/{name}").into());
    }
    let running = plan(&first, &resources).unwrap();
    assert_eq!(running.live(&first).unwrap().volumes, []);
    let errors = running.live(&vmi(json!({}))).unwrap().restart_required;
    assert_eq!(errors[0].field, "spec.domain.devices.disks");
}

#[test]
fn volumes_that_were_plugged_are_not_a_part_of_the_vm() {
    let mut resources = PodResources::default();
    resources.volumes.insert("root".into(), "/root.img".into());
    let first = plan(&vmi(with_cd("cdrom", None)), &resources).unwrap();
    let mut change = with_cd("cdrom", Some(claim(true)));
    let volumes = change["spec"]["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": "data", "dataVolume": {"name": "dv", "hotpluggable": true}}));
    let more = vmi(change);
    let wanted = first.live(&more).unwrap();
    assert_eq!(wanted.volumes.len(), 2);

    let mut later = first.clone();
    for volume in &wanted.volumes {
        let source = DiskSource::File(format!("/{}", volume.name).into());
        let volume = NewVolume {
            source,
            ..volume.clone()
        };
        match later.plug(&volume).unwrap() {
            PlugPlan::New(disk) => later.disks.push(*disk),
            PlugPlan::Disc(drive) => {
                let place = later.disks.iter().position(|disk| disk.name == drive.name);
                later.disks[place.unwrap()] = *drive;
            }
            present @ PlugPlan::Present(_) => panic!("{present:?}"),
        }
    }
    assert_ne!(later.live(&more).unwrap(), wanted);
    assert_eq!(later.without_plugged(&["cd".into(), "data".into()]), first);
}

/// A merge patch: an entry `cd` of this kind beside the disk `root`, and its volume, if it has one.
fn with_cd(kind: &str, volume: Option<Value>) -> Value {
    let mut volumes = vec![
        json!({"name": "root", "persistentVolumeClaim": {"claimName": "root"}}),
        json!({"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config"}}),
    ];
    volumes.extend(volume);
    json!({"spec": {
        "volumes": volumes,
        "domain": {"devices": {"disks": [
            {"name": "root", "disk": {"bus": "virtio"}},
            {"name": "cd", kind: {"bus": "scsi"}, "errorPolicy": "report"},
        ]}},
    }})
}

fn claim(hotpluggable: bool) -> Value {
    json!({"name": "cd", "persistentVolumeClaim": {"claimName": "iso", "hotpluggable": hotpluggable}})
}

/// The errors of the change of a VM that has an empty drive.
fn refused_for_drive(change: Value) -> Vec<String> {
    let mut resources = PodResources::default();
    resources.volumes.insert("root".into(), "/root.img".into());
    let running = plan(&vmi(with_cd("cdrom", None)), &resources).unwrap();
    let refused = whole(&running, &vmi(change)).unwrap_err();
    refused.iter().map(ToString::to_string).collect()
}

#[test]
fn a_hotpluggable_volume_is_the_disc_of_an_empty_drive() {
    let mut resources = PodResources::default();
    resources.volumes.insert("root".into(), "/root.img".into());
    let running = plan(&vmi(with_cd("cdrom", None)), &resources).unwrap();
    assert_eq!(running.live(&vmi(with_cd("cdrom", None))).unwrap().volumes, []);
    let disc = NewVolume {
        name: "cd".into(),
        read_only: true,
        error_policy: crate::ErrorPolicy::Report,
        origin: Some("persistentVolumeClaim/iso".into()),
        ..NewVolume::default()
    };
    let wanted = running.live(&vmi(with_cd("cdrom", Some(claim(true))))).unwrap();
    assert_eq!(wanted.volumes, [disc]);
}

#[test]
fn a_drive_stays_as_it_is() {
    let said = refused_for_drive(with_cd("cdrom", Some(claim(false))));
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].starts_with("spec.volumes[2]: ") && said[0].contains("is not hotpluggable"),
        "{said:?}"
    );
    // Neither another device, nor another property, nor its removal.
    let mut other = with_cd("cdrom", Some(claim(true)));
    other["spec"]["domain"]["devices"]["disks"][1]["serial"] = json!("S");
    for (change, field) in [
        (with_cd("disk", Some(claim(true))), "spec.domain.devices.disks: "),
        (other, "spec.domain.devices.disks[1]: "),
        (json!({}), "spec.domain.devices.disks: "),
    ] {
        let said = refused_for_drive(change);
        assert!(said.len() == 1 && said[0].starts_with(field), "{said:?}");
    }
    let said = live(with_cd("cdrom", None)).unwrap_err();
    let wanted = "the CD-ROM drive \"cd\" cannot be added while the VM runs: restart the VM";
    assert!(
        said.starts_with("spec.domain.devices.disks[1]: ") && said.contains(wanted),
        "{said}"
    );
}

#[test]
fn interfaces_are_plugged_unplugged_and_set_down() {
    let change = |default: Value, red: Value| {
        json!({"spec": {
            "networks": [{"name": "default", "pod": {}}, {"name": "red", "multus": {"networkName": "red"}}],
            "domain": {"devices": {"interfaces": [default, red]}},
        }})
    };
    let default = json!({"name": "default", "masquerade": {}, "state": "down"});
    let red = json!({"name": "red", "bridge": {}, "macAddress": "02:00:00:00:00:07"});
    let found = live(change(default.clone(), red)).unwrap().interfaces;
    let down = InterfaceUpdate::Planned {
        name: "default".into(),
        link_up: false,
    };
    assert_eq!(found[0], down);
    let InterfaceUpdate::Added(red) = &found[1] else {
        panic!("{found:?}")
    };
    assert_eq!((red.name.as_str(), red.mac), ("red", Some([2, 0, 0, 0, 0, 7])));
    let red = json!({"name": "red", "bridge": {}, "state": "absent"});
    let absent = InterfaceUpdate::Absent {
        name: "red".into(),
        planned: false,
    };
    assert_eq!(live(change(default, red)).unwrap().interfaces[1], absent);
}

#[test]
fn a_vm_without_a_network_is_no_other_for_it() {
    let mut running = running();
    running.nics.clear();
    let found = running.live(&vmi(json!({}))).unwrap().interfaces;
    assert!(matches!(&found[..], [InterfaceUpdate::Added(_)]), "{found:?}");
}

#[test]
fn a_kernel_that_the_caller_gave_is_not_the_manifests() {
    let mut resources = PodResources {
        kernel: Some(KernelOverride {
            kernel: Some("/vmlinuz".into()),
            initrd: Some("/initrd".into()),
            append: Some("quiet".into()),
        }),
        ..PodResources::default()
    };
    resources.volumes.insert("root".into(), "/root.img".into());
    let running = plan(&vmi(json!({})), &resources).unwrap();
    running.live(&vmi(json!({}))).unwrap();
}

#[test]
fn kernel_files_are_part_of_the_vm() {
    let boot = |initrd: &str, arguments: &str| {
        let files = json!({"image": "any", "kernelPath": "/vmlinuz", "initrdPath": initrd});
        let boot = json!({"kernelArgs": arguments, "container": files});
        vmi(json!({"spec": {"domain": {"firmware": {"kernelBoot": boot}}}}))
    };
    let mut resources = PodResources {
        // As `husk run --append` adds to it.
        kernel: Some(KernelOverride {
            append: Some("quiet".into()),
            ..KernelOverride::default()
        }),
        ..PodResources::default()
    };
    for (volume, path) in [("root", "/root.img"), (KERNEL_VOLUME, "/kernel")] {
        resources.volumes.insert(volume.into(), path.into());
    }
    let running = plan(&boot("/initrd", "console=ttyS0 ro"), &resources).unwrap();
    running.live(&boot("/initrd", "console=ttyS0 ro")).unwrap();
    for other in [
        boot("/initrd", "console=ttyS0"),
        boot("/other", "console=ttyS0 ro"),
    ] {
        let errors = running.live(&other).unwrap().restart_required;
        assert_eq!(errors.len(), 1, "{errors:?}");
        let error = errors[0].to_string();
        assert!(error.starts_with("spec.domain.firmware.kernelBoot:"), "{error}");
    }
}
