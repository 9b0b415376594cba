//! Warnings of a plan: fields that Husk meets differently than KubeVirt, by their paths.

mod common;

use common::{resources, vmi, warnings_of, with};
use husk_vmi::plan;
use serde_json::{Value, json};

#[test]
fn fields_that_are_met_differently_are_noted_by_path() {
    for (pointer, value, field) in [
        ("priorityClassName", json!("high"), "priorityClassName"),
        ("nodeSelector", json!({"a": "b"}), "nodeSelector"),
        ("affinity", json!({"nodeAffinity": {}}), "affinity"),
        ("schedulerName", json!("s"), "schedulerName"),
        ("serviceAccountName", json!("a"), "serviceAccountName"),
        ("tolerations", json!([{"key": "a"}]), "tolerations"),
        (
            "topologySpreadConstraints",
            json!([{"maxSkew": 1}]),
            "topologySpreadConstraints",
        ),
        ("evictionStrategy", json!("LiveMigrate"), "evictionStrategy"),
        (
            "readinessProbe",
            json!({"exec": {"command": ["true"]}, "periodSeconds": 3}),
            "readinessProbe",
        ),
        ("dnsPolicy", json!("Default"), "dnsPolicy"),
        ("dnsConfig", json!({"nameservers": ["::1"]}), "dnsConfig"),
        (
            "domain/resources/overcommitGuestOverhead",
            json!(true),
            "domain.resources.overcommitGuestOverhead",
        ),
        ("domain/cpu/maxSockets", json!(4), "domain.cpu.maxSockets"),
        ("domain/cpu/model", json!("Skylake-Server"), "domain.cpu.model"),
        ("domain/memory/maxGuest", json!("4Gi"), "domain.memory.maxGuest"),
        ("domain/machine/type", json!("q35"), "domain.machine.type"),
        ("domain/ioThreadsPolicy", json!("auto"), "domain.ioThreadsPolicy"),
        ("domain/chassis", json!({"manufacturer": "m"}), "domain.chassis"),
        (
            "domain/clock/timer",
            json!({"kvm": {"present": false}}),
            "domain.clock.timer.kvm",
        ),
        (
            "domain/features/apic",
            json!({"endOfInterrupt": true}),
            "domain.features.apic.endOfInterrupt",
        ),
        (
            "domain/features/hyperv",
            json!({"relaxed": {}}),
            "domain.features.hyperv",
        ),
        ("domain/features/smm", json!({}), "domain.features.smm"),
        (
            "domain/features/pvspinlock",
            json!({"enabled": false}),
            "domain.features.pvspinlock",
        ),
        (
            "domain/firmware/bootloader",
            json!({"bios": {"useSerial": true}}),
            "domain.firmware.bootloader.bios",
        ),
        (
            "domain/firmware/bootloader",
            json!({"efi": {"secureBoot": false}}),
            "domain.firmware.bootloader.efi",
        ),
        (
            "domain/devices/useVirtioTransitional",
            json!(true),
            "domain.devices.useVirtioTransitional",
        ),
        (
            "domain/devices/inputs",
            json!([{"name": "a", "type": "tablet", "bus": "usb"}]),
            "domain.devices.inputs",
        ),
        (
            "domain/devices/autoattachGraphicsDevice",
            json!(true),
            "domain.devices.autoattachGraphicsDevice",
        ),
        (
            "domain/devices/autoattachInputDevice",
            json!(true),
            "domain.devices.autoattachInputDevice",
        ),
        (
            "domain/devices/logSerialConsole",
            json!(false),
            "domain.devices.logSerialConsole",
        ),
        (
            "domain/devices/video",
            json!({"type": "vga"}),
            "domain.devices.video",
        ),
        (
            "domain/devices/disks/0",
            json!({"name": "root", "disk": {"bus": "scsi"}, "dedicatedIOThread": true}),
            "domain.devices.disks[0].dedicatedIOThread",
        ),
        (
            "domain/devices/disks/0",
            json!({"name": "root", "cdrom": {"bus": "scsi", "readonly": false}}),
            "domain.devices.disks[0].cdrom.readonly",
        ),
        (
            "domain/devices/disks/0",
            json!({"name": "root", "lun": {"bus": "virtio"}}),
            "domain.devices.disks[0].lun.bus",
        ),
        (
            "domain/devices/disks/0",
            json!({"name": "root", "lun": {"bus": "scsi"}, "serial": "S1"}),
            "domain.devices.disks[0].serial",
        ),
        (
            "domain/devices/disks/0",
            json!({"name": "root", "lun": {"bus": "scsi"}, "errorPolicy": "stop"}),
            "domain.devices.disks[0].errorPolicy",
        ),
        (
            "domain/devices/disks/0/tag",
            json!("a"),
            "domain.devices.disks[0].tag",
        ),
        (
            "domain/devices/disks/0/blockSize",
            json!({"custom": {"logical": 512, "physical": 512, "discardGranularity": 4096}}),
            "domain.devices.disks[0].blockSize.custom.discardGranularity",
        ),
        (
            "domain/devices/disks/0/io",
            json!("native"),
            "domain.devices.disks[0].io",
        ),
        (
            "domain/features/acpi/enabled",
            json!(false),
            "domain.features.acpi.enabled",
        ),
        (
            "domain/devices/disks/0/disk/bus",
            json!("sata"),
            "domain.devices.disks[0].disk.bus",
        ),
        (
            "domain/devices/disks/0/disk",
            json!({}),
            "domain.devices.disks[0]",
        ),
        (
            "volumes/0/persistentVolumeClaim/hotpluggable",
            json!(true),
            "volumes[0].persistentVolumeClaim.hotpluggable",
        ),
    ] {
        let manifest = with(&[(pointer, value)]);
        let plan = plan(&vmi(&manifest), &resources(&[("root", "/r")])).unwrap();
        let fields: Vec<&str> = plan
            .warnings
            .iter()
            .map(|warning| warning.field.as_str())
            .collect();
        assert_eq!(fields, [format!("spec.{field}").as_str()], "{:?}", plan.warnings);
    }
}

#[test]
fn interfaces_that_are_met_differently_are_noted_by_path() {
    let warned = |interface: Value, pod: Value| {
        let mut nic = json!({"name": "a"});
        nic.as_object_mut()
            .unwrap()
            .extend(interface.as_object().unwrap().clone());
        let manifest = with(&[
            ("domain/devices/interfaces", json!([nic])),
            ("networks", json!([{"name": "a", "pod": pod}])),
        ]);
        let plan = plan(&vmi(&manifest), &resources(&[("root", "/r")])).unwrap();
        Vec::from_iter(plan.warnings.into_iter().map(|warning| warning.field))
    };
    let path = "spec.domain.devices.interfaces[0]";
    for model in ["e1000", "e1000e", "igb", "ne2k_pci", "pcnet", "rtl8139"] {
        assert_eq!(
            warned(json!({"model": model}), json!({})),
            [format!("{path}.model")]
        );
    }
    for (name, value) in [
        ("tag", json!("t")),
        ("acpiIndex", json!(3)),
        ("ports", json!([{"port": 80}])),
    ] {
        assert_eq!(
            warned(json!({name: value}), json!({})),
            [format!("{path}.{name}")]
        );
    }
    for (name, cidr) in [
        ("vmNetworkCIDR", "10.1.0.0/24"),
        ("vmIPv6NetworkCIDR", "fd01::/120"),
    ] {
        let pod = json!({name: cidr});
        assert_eq!(
            warned(json!({"bridge": {}}), pod.clone()),
            [format!("spec.networks[0].pod.{name}")]
        );
        let served = json!({"masquerade": {}, "ports": [{"port": 80}], "model": "virtio"});
        assert_eq!(warned(served, pod), [""; 0]);
    }
}

#[test]
fn a_container_disk_that_can_be_written_is_noted() {
    for (target, has_warning) in [
        (json!({"bus": "virtio"}), true),
        (json!({"bus": "virtio", "readonly": true}), false),
    ] {
        let manifest = with(&[
            ("domain/devices/disks/0/disk", target),
            (
                "volumes/0",
                json!({"name": "root", "containerDisk": {"image": "i"}}),
            ),
        ]);
        let warnings = husk_vmi::warnings(&vmi(&manifest));
        let found = warnings
            .iter()
            .any(|warning| warning.field == "spec.volumes[0].containerDisk");
        assert_eq!(found, has_warning, "{warnings:?}");
    }
}

#[test]
fn fields_that_ask_for_nothing_are_silent() {
    let manifest = with(&[
        ("domain/devices/disks/0/errorPolicy", json!("report")),
        ("domain/devices/disks/0/dedicatedIOThread", json!(true)),
        ("domain/devices/disks/0/blockSize", json!({"matchVolume": {}})),
        ("domain/devices/disks/0/io", json!("")),
        ("domain/features/acpi/enabled", json!(true)),
        ("domain/devices/gpus", json!([])),
        ("domain/devices/autoattachVSOCK", json!(false)),
        ("domain/devices/blockMultiQueue", json!(false)),
        ("domain/devices/autoattachPodInterface", json!(true)),
        ("domain/devices/networkInterfaceMultiqueue", json!(true)),
        ("hostname", json!("a")),
        ("subdomain", json!("b")),
        ("domain/devices/sound", Value::Null),
        (
            "domain/devices/tpm",
            json!({"enabled": false, "persistent": true}),
        ),
        ("domain/cpu/dedicatedCpuPlacement", json!(false)),
        ("domain/cpu/model", json!("host-model")),
    ]);
    assert_eq!(
        warnings_of(&plan(&vmi(&manifest), &resources(&[("root", "/r")])).unwrap()),
        [] as [&str; 0]
    );
}
