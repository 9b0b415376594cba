//! Preferred fields.

use super::*;

#[test]
fn preferences_fill_what_the_vm_leaves_open() {
    for (preference, pointer, want) in [
        (
            json!({"devices": {"preferredDiskBus": "virtio"}}),
            "/domain/devices/disks/0/disk/bus",
            json!("virtio"),
        ),
        (
            json!({"devices": {"preferredDiskCache": "none"}}),
            "/domain/devices/disks/0/cache",
            json!("none"),
        ),
        (
            json!({"devices": {"preferredDiskIO": "native"}}),
            "/domain/devices/disks/0/io",
            json!("native"),
        ),
        (
            json!({"devices": {"preferredDiskBlockSize": {"matchVolume": {}}}}),
            "/domain/devices/disks/0/blockSize",
            json!({"matchVolume": {}}),
        ),
        (
            json!({"devices": {"preferredDiskBus": "virtio", "preferredDiskDedicatedIoThread": true}}),
            "/domain/devices/disks/0/dedicatedIOThread",
            json!(true),
        ),
        (
            json!({"devices": {"preferredDiskBus": "scsi", "preferredDiskDedicatedIoThread": true}}),
            "/domain/devices/disks/0/dedicatedIOThread",
            json!(null),
        ),
        (
            json!({"devices": {"preferredInterfaceModel": "virtio"}}),
            "/domain/devices/interfaces/0/model",
            json!("virtio"),
        ),
        (
            json!({"devices": {"preferredInterfaceMasquerade": {}}}),
            "/domain/devices/interfaces/0",
            json!({"name": "default", "bridge": {}}),
        ),
        (
            json!({"devices": {"preferredAutoattachPodInterface": false}}),
            "/domain/devices/interfaces",
            json!(null),
        ),
        (
            json!({"devices": {"preferredAutoattachMemBalloon": false}}),
            "/domain/devices/autoattachMemBalloon",
            json!(false),
        ),
        (
            json!({"devices": {"preferredBlockMultiQueue": true}}),
            "/domain/devices/blockMultiQueue",
            json!(true),
        ),
        (
            json!({"devices": {"preferredNetworkInterfaceMultiQueue": true}}),
            "/domain/devices/networkInterfaceMultiqueue",
            json!(true),
        ),
        (
            json!({"devices": {"preferredRng": {}}}),
            "/domain/devices/rng",
            json!({}),
        ),
        (
            json!({"devices": {"preferredVideoType": "vga"}}),
            "/domain/devices/video/type",
            json!("vga"),
        ),
        (
            json!({"devices": {"preferredPanicDeviceModel": "isa"}}),
            "/domain/devices/panicDevices",
            json!([{"model": "isa"}]),
        ),
        (
            json!({"devices": {"preferredSoundModel": "ac97"}}),
            "/domain/devices/sound",
            json!(null),
        ),
        (
            json!({"features": {"preferredSmm": {}}}),
            "/domain/features/smm",
            json!({}),
        ),
        (
            json!({"features": {"preferredHyperv": {"relaxed": {}}}}),
            "/domain/features/hyperv",
            json!({"relaxed": {}}),
        ),
        (
            json!({"firmware": {"preferredUseBios": true, "preferredUseBiosSerial": true, "preferredUseEfi": true}}),
            "/domain/firmware/bootloader",
            json!({"bios": {"useSerial": true}}),
        ),
        (
            json!({"firmware": {"preferredUseEfi": true, "preferredUseSecureBoot": false}}),
            "/domain/firmware/bootloader",
            json!({"efi": {"secureBoot": false}}),
        ),
        (
            json!({"firmware": {"preferredEfi": {"persistent": true}, "preferredUseSecureBoot": false}}),
            "/domain/firmware/bootloader",
            json!({"efi": {"persistent": true}}),
        ),
        (
            json!({"machine": {"preferredMachineType": "q35"}}),
            "/domain/machine/type",
            json!("q35"),
        ),
        (
            json!({"clock": {"preferredClockOffset": {"timezone": "Europe/Berlin"}, "preferredTimer": {"kvm": {}}}}),
            "/domain/clock",
            json!({"timezone": "Europe/Berlin", "timer": {"kvm": {}}}),
        ),
        (json!({"preferredSubdomain": "sub"}), "/subdomain", json!("sub")),
        (
            json!({"preferredTerminationGracePeriodSeconds": 5}),
            "/terminationGracePeriodSeconds",
            json!(5),
        ),
        (
            json!({"preferredArchitecture": "amd64"}),
            "/architecture",
            json!("amd64"),
        ),
        (
            json!({"preferredLaunchSecurity": {"snp": {}}}),
            "/domain/launchSecurity",
            json!({"snp": {}}),
        ),
        (
            json!({"cpu": {"preferredCPUFeatures": [{"name": "aes"}]}}),
            "/domain/cpu/features",
            json!([{"name": "aes"}]),
        ),
    ] {
        let case = Case::preferring(preference.clone());
        let spec = &case.template()["spec"];
        assert_eq!(
            spec.pointer(pointer).unwrap_or(&Value::Null),
            &want,
            "{preference}"
        );
        case.vmi();
    }
}

#[test]
fn the_vm_wins_over_preferences() {
    for (pointer, value, preference, at, want) in [
        (
            "domain/devices/disks/0/disk",
            json!({"bus": "scsi"}),
            json!({"devices": {"preferredDiskBus": "virtio"}}),
            "/domain/devices/disks/0/disk/bus",
            json!("scsi"),
        ),
        (
            "domain/devices/rng",
            json!({}),
            json!({"devices": {"preferredRng": {}}}),
            "/domain/devices/rng",
            json!({}),
        ),
        (
            "domain/clock",
            json!({"utc": {}}),
            json!({"clock": {"preferredClockOffset": {"timezone": "Europe/Berlin"}}}),
            "/domain/clock",
            json!({"utc": {}}),
        ),
        (
            "domain/firmware",
            json!({"bootloader": {"bios": {}}}),
            json!({"firmware": {"preferredEfi": {}, "preferredUseSecureBoot": true}}),
            "/domain/firmware/bootloader",
            json!({"bios": {}}),
        ),
        (
            "domain/features",
            json!({"hyperv": {"relaxed": {"enabled": false}}}),
            json!({"features": {"preferredHyperv": {"relaxed": {}, "vapic": {}}}}),
            "/domain/features/hyperv",
            json!({"relaxed": {"enabled": false}, "vapic": {}}),
        ),
        (
            "domain/cpu",
            json!({"features": [{"name": "aes", "policy": "forbid"}]}),
            json!({"cpu": {"preferredCPUFeatures": [{"name": "aes"}, {"name": "avx"}]}}),
            "/domain/cpu/features",
            json!([{"name": "aes", "policy": "forbid"}, {"name": "avx"}]),
        ),
        (
            "domain/devices/sound",
            json!({"name": "s"}),
            json!({"devices": {"preferredSoundModel": "ac97"}}),
            "/domain/devices/sound/model",
            json!("ac97"),
        ),
        (
            "subdomain",
            json!("mine"),
            json!({"preferredSubdomain": "sub"}),
            "/subdomain",
            json!("mine"),
        ),
        // KubeVirt overwrites these two.
        (
            "domain/devices/disableHotplug",
            json!(true),
            json!({"devices": {"preferredDisableHotplug": false}}),
            "/domain/devices/disableHotplug",
            json!(false),
        ),
        (
            "domain/features",
            json!({"acpi": {"enabled": true}}),
            json!({"features": {"preferredAcpi": {"enabled": false}}}),
            "/domain/features/acpi/enabled",
            json!(false),
        ),
    ] {
        let case = Case::preferring(preference.clone()).set(pointer, value);
        assert_eq!(case.template()["spec"].pointer(at), Some(&want), "{preference}");
    }
}

#[test]
fn every_kind_of_disk_and_interface_has_its_preference() {
    let preference = json!({"devices": {
        "preferredDiskBus": "virtio", "preferredCdromBus": "sata", "preferredLunBus": "scsi",
        "preferredInterfaceMasquerade": {}, "preferredInputBus": "usb", "preferredInputType": "tablet",
    }});
    let case = Case::preferring(preference)
        .set(
            "domain/devices/disks",
            json!([{"name": "cd", "cdrom": {}}, {"name": "lun", "lun": {}}]),
        )
        .set(
            "domain/devices/interfaces",
            json!([{"name": "a"}, {"name": "b"}, {"name": "c", "bridge": {}}]),
        )
        .set("domain/devices/inputs", json!([{"name": "i", "type": ""}]))
        .set(
            "networks",
            json!([{"name": "a", "pod": {}}, {"name": "b", "multus": {"networkName": "n"}}]),
        );
    let devices = &case.template()["spec"]["domain"]["devices"];
    // The volume without a disk has one.
    assert_eq!(
        devices["disks"],
        json!([
            {"name": "cd", "cdrom": {"bus": "sata"}},
            {"name": "lun", "lun": {"bus": "scsi"}},
            {"name": "root", "disk": {"bus": "virtio"}},
        ])
    );
    assert_eq!(
        devices["interfaces"],
        json!([{"name": "a", "masquerade": {}}, {"name": "b"}, {"name": "c", "bridge": {}}])
    );
    assert_eq!(
        devices["inputs"],
        json!([{"name": "i", "type": "tablet", "bus": "usb"}])
    );
}

#[test]
fn annotations_and_storage_classes_are_preferred() {
    let mut case = Case::preferring(json!({
        "annotations": {"a": "1", "b": "2"}, "volumes": {"preferredStorageClassName": "fast"},
    }));
    case.vm["spec"]["template"]["metadata"] = json!({"annotations": {"a": "0"}});
    let template = |name: &str, storage: Value| {
        let spec = json!({"source": {"blank": {}}, "storage": storage});
        json!({"metadata": {"name": name}, "spec": spec})
    };
    let size = json!({"requests": {"storage": "1Gi"}});
    case.vm["spec"]["dataVolumeTemplates"] = json!([
        template("root", json!({"resources": size})),
        template("data", json!({"resources": size, "storageClassName": "slow"})),
    ]);
    let volumes = ["root", "data"].map(|name| json!({"name": name, "dataVolume": {"name": name}}));
    let volumes = json!(volumes);
    let expansion = case.set("volumes", volumes).expand().unwrap();
    let annotations = &expansion.vmi.annotations;
    assert_eq!((annotations["a"].as_str(), annotations["b"].as_str()), ("0", "2"));
    assert_eq!(annotations["kubevirt.io/cluster-preference-name"], "preference");
    let classes: Vec<_> = expansion
        .data_volumes
        .iter()
        .map(|data| data.claim.storage_class_name.as_deref())
        .collect();
    assert_eq!(classes, [Some("fast"), Some("slow")]);
}
