//! Manifests in KubeVirt's whole vocabulary: what is honoured, what is warned about and what is refused.

mod common;

use std::path::PathBuf;

use common::{faults, vmi, with};
use husk_vmi::{BootPlan, DeviceType, DiskSource, Loaded, PodResources, Topology, VmPlan, load, plan};
use serde_json::{Value, json};

/// A VirtualMachineInstance of a plain kind: container disk, scratch disk, cloud-init, bridge.
const INSTANCE: &str = r##"
apiVersion: kubevirt.io/v1alpha3
kind: VirtualMachineInstance
metadata:
  name: blue
  labels: {special: blue}
spec:
  terminationGracePeriodSeconds: 0
  domain:
    resources: {requests: {memory: 1024M}}
    machine: {type: q35}
    devices:
      rng: {}
      disks:
      - {name: system, disk: {bus: virtio}}
      - {name: scratch, disk: {bus: virtio}}
      - {name: seed, disk: {bus: virtio}}
      interfaces:
      - {name: default, bridge: {}}
  networks:
  - {name: default, pod: {}}
  volumes:
  - {name: system, containerDisk: {image: registry/blue:1, imagePullPolicy: Always}}
  - {name: scratch, emptyDisk: {capacity: 2Gi}}
  - name: seed
    cloudInitNoCloud:
      userData: |
        #cloud-config
        password: blue
        chpasswd: {expire: False}
"##;

/// A VirtualMachine of a Linux server on a claim.
const MACHINE: &str = r#"
apiVersion: v1
kind: Secret
metadata: {name: unused}
---
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata:
  name: green.example
  namespace: prod
spec:
  running: true
  template:
    metadata:
      labels: {kubevirt.io/domain: green}
      annotations: {kubevirt.io/keep-launcher-alive-after-failure: "true"}
    spec:
      nodeSelector: {kubevirt.io/schedulable: "true"}
      architecture: amd64
      domain:
        cpu: {cores: 2}
        resources: {requests: {memory: 4G}}
        devices:
          disks:
          - {name: data, bootOrder: 2, disk: {bus: virtio}}
          - {name: root, bootOrder: 1, disk: {}}
          interfaces:
          - {name: default, masquerade: {}, model: e1000}
      networks:
      - {name: default, pod: {}}
      volumes:
      - {name: root, persistentVolumeClaim: {claimName: green-root}}
      - {name: data, hostDisk: {path: /data/green.img, type: DiskOrCreate, capacity: 1Gi}}
"#;

/// A VirtualMachine with a Windows guest's clock, firmware and CD-ROM.
const DESKTOP: &str = r#"
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: desktop}
spec:
  running: false
  template:
    spec:
      domain:
        clock:
          utc: {}
          timer:
            hpet: {present: false}
            hyperv: {}
            pit: {tickPolicy: delay}
            rtc: {tickPolicy: catchup}
        cpu: {cores: 4}
        features: {acpi: {enabled: true}, apic: {}, hyperv: {relaxed: {}, vapic: {}, spinlocks: {spinlocks: 8191}}}
        firmware: {uuid: 5d307ca9-b3ef-428c-8861-06e72d69f223}
        resources: {requests: {memory: 16G}}
        devices:
          disks:
          - {name: disk, bootOrder: 1, disk: {bus: sata}}
          - {name: drivers, cdrom: {bus: sata}}
      volumes:
      - {name: disk, hostDisk: {path: /data/desktop.img, type: Disk}}
      - {name: drivers, containerDisk: {image: registry/drivers}}
"#;

fn only(text: &str) -> husk_vmi::Vmi {
    let vm = load(text)
        .unwrap()
        .into_iter()
        .find_map(|document| match document {
            Loaded::Vmi(vmi) => Some(*vmi),
            Loaded::Other { .. } => None,
        });
    vm.unwrap()
}

fn resources(volumes: &[(&str, &str)]) -> PodResources {
    PodResources {
        volumes: volumes
            .iter()
            .map(|(name, path)| ((*name).to_owned(), PathBuf::from(path)))
            .collect(),
        uuid: "11111111-2222-4333-8444-555555555555".parse().unwrap(),
        now_unix_seconds: 1_782_864_000, // 2026-07-01
        ..PodResources::default()
    }
}

fn noted(plan: &VmPlan) -> Vec<String> {
    plan.notes.iter().map(ToString::to_string).collect()
}

#[test]
fn an_instance_is_planned() {
    let vmi = only(INSTANCE);
    let plan = plan(&vmi, &resources(&[("system", "/images/blue.qcow2")])).unwrap();
    insta::assert_snapshot!(serde_json::to_string_pretty(&plan).unwrap());
    let again: VmPlan = serde_json::from_value(serde_json::to_value(&plan).unwrap()).unwrap();
    assert_eq!(again, plan);
}

#[test]
fn a_vm_is_planned_and_other_documents_are_recognised() {
    let documents = load(MACHINE).unwrap();
    assert!(
        matches!(&documents[0], Loaded::Other { kind, name, .. } if kind == "Secret" && name == "unused")
    );
    let vmi = only(MACHINE);
    assert_eq!(
        (vmi.name.as_str(), vmi.namespace.as_str()),
        ("green.example", "prod")
    );
    assert_eq!(vmi.labels["kubevirt.io/domain"], "green");
    let plan = plan(&vmi, &resources(&[("root", "/dev/vg/green")])).unwrap();
    assert_eq!(
        plan.topology,
        Topology {
            sockets: 1,
            cores: 2,
            threads: 1
        }
    );
    assert_eq!(plan.memory.guest_bytes, 4_000_002_048, "whole pages");
    assert_eq!(
        plan.boot,
        BootPlan::Disks {
            order: vec!["root".into(), "data".into()],
            append: None
        }
    );
    let targets: Vec<&str> = plan.disks.iter().map(|disk| disk.target.as_str()).collect();
    assert_eq!(targets, ["vda", "sda"]);
    assert_eq!(
        plan.disks[0].source,
        DiskSource::HostDisk {
            path: "/data/green.img".into(),
            create_bytes: Some(1 << 30)
        }
    );
    assert_eq!(plan.disks[1].source, DiskSource::File("/dev/vg/green".into()));
    // uuid5 of KubeVirt's UUID for VirtualMachines and "prod/green.example".
    assert_eq!(plan.uuid.to_string(), "e870800d-1f24-5627-8917-313212584cf7");
    assert_eq!(
        noted(&plan),
        [
            "spec.template.spec.nodeSelector: is ignored: it only concerns the pod that runs the VM in a cluster",
            "spec.running: a cluster would restart this VM after its end; Husk does not",
            "spec.template.spec.domain.devices.disks[1]: has no bus; KubeVirt's default, sata, is provided as scsi: \
             the guest still sees sda, sdb …, but uses the driver virtio_scsi",
            "spec.template.spec.domain.devices.interfaces[0].model: e1000 is provided as virtio: the guest needs the \
             driver virtio_net",
        ]
    );
}

#[test]
fn vms_of_one_name_have_a_uuid_for_each_namespace() {
    let uuid = |namespace: &str| {
        let text = MACHINE.replace("namespace: prod", namespace);
        only(&text).spec.domain.firmware.uuid.unwrap()
    };
    let of_kubevirt = "9d9b4d14-39ef-5aa6-a70b-9356579a82e3";
    assert_eq!([uuid(""), uuid("namespace: default")], [of_kubevirt; 2]);
    assert_ne!(uuid("namespace: prod"), of_kubevirt);
    assert_ne!(uuid("namespace: prod"), uuid("namespace: test"));
}

#[test]
fn desktop_devices_are_served_or_noted() {
    let vmi = only(DESKTOP);
    let plan = plan(&vmi, &resources(&[("drivers", "/images/drivers.iso")])).unwrap();
    let fields: Vec<&str> = plan.notes.iter().map(|note| note.field.as_str()).collect();
    let at = |field: &str| format!("spec.template.spec.domain.{field}");
    for field in [
        "clock.timer.hpet",
        "clock.timer.pit",
        "clock.timer.rtc",
        "clock.timer.hyperv",
        "features.hyperv",
        "devices.disks[0].disk.bus",
        "devices.disks[1].cdrom.bus",
    ] {
        assert!(fields.contains(&at(field).as_str()), "{field} in {fields:?}");
    }
    assert!(fields.contains(&"spec.running"));
    assert_eq!(plan.uuid.to_string(), "5d307ca9-b3ef-428c-8861-06e72d69f223");
    let drivers = &plan.disks[1];
    assert_eq!(drivers.device, DeviceType::Cdrom { tray_open: false });
    assert!(drivers.read_only && !drivers.overlay);
    assert_eq!(drivers.target, "sdb");
    let copied = fields.contains(&"spec.template.spec.volumes[1].containerDisk");
    assert!(!copied, "nothing is written to a CD-ROM");
}

#[test]
fn fields_that_cannot_be_left_out_are_refused_by_path() {
    for (pointer, value, field) in [
        (
            "domain/devices/gpus",
            json!([{"name": "a", "deviceName": "b"}]),
            "domain.devices.gpus",
        ),
        (
            "domain/devices/hostDevices",
            json!([{"name": "a"}]),
            "domain.devices.hostDevices",
        ),
        ("domain/devices/tpm", json!({}), "domain.devices.tpm"),
        (
            "domain/devices/tpm",
            json!({"enabled": true}),
            "domain.devices.tpm",
        ),
        (
            "domain/devices/watchdog",
            json!({"name": "a", "diag288": {}}),
            "domain.devices.watchdog.diag288",
        ),
        (
            "domain/devices/filesystems",
            json!([{"name": "a", "virtiofs": {}}]),
            "domain.devices.filesystems",
        ),
        (
            "domain/devices/sound",
            json!({"name": "a"}),
            "domain.devices.sound",
        ),
        (
            "domain/devices/clientPassthrough",
            json!({}),
            "domain.devices.clientPassthrough",
        ),
        (
            "domain/launchSecurity",
            json!({"sev": {}}),
            "domain.launchSecurity",
        ),
        (
            "domain/cpu/features",
            json!([{"name": "vmx", "policy": "require"}]),
            "domain.cpu.features",
        ),
        (
            "domain/cpu/numa",
            json!({"guestMappingPassthrough": {}}),
            "domain.cpu.numa",
        ),
        ("domain/cpu/realtime", json!({}), "domain.cpu.realtime"),
        (
            "domain/features/kvm",
            json!({"hidden": true}),
            "domain.features.kvm.hidden",
        ),
        (
            "domain/features/apic",
            json!({"enabled": false}),
            "domain.features.apic.enabled",
        ),
        ("domain/rebootPolicy", json!("Terminate"), "domain.rebootPolicy"),
        (
            "domain/firmware/acpi",
            json!({"slicNameRef": "a"}),
            "domain.firmware.acpi",
        ),
        (
            "domain/devices/disks/0/disk/bus",
            json!("usb"),
            "domain.devices.disks[0].disk.bus",
        ),
        (
            "domain/devices/disks/0/disk/pciAddress",
            json!("0000:81:01.0"),
            "domain.devices.disks[0].disk.pciAddress",
        ),
        ("architecture", json!("arm64"), "architecture"),
        (
            "volumes/0",
            json!({"name": "root", "sysprep": {"configMap": {"name": "a"}}}),
            "volumes[0].sysprep",
        ),
        (
            "domain/devices/disks/0",
            json!({"name": "root", "cdrom": {"bus": "usb"}}),
            "domain.devices.disks[0].cdrom.bus",
        ),
    ] {
        let faults = faults(&with(&[(pointer, value)]));
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert_eq!(faults[0].field, format!("spec.{field}"));
        assert_eq!(faults[0].reason, husk_vmi::CauseReason::FieldValueNotSupported);
    }
    let changes = [
        ("domain/firmware/bootloader/efi", json!({})),
        ("domain/features/smm", json!({})),
    ];
    assert_eq!(
        faults(&with(&changes))[0].field,
        "spec.domain.firmware.bootloader.efi.secureBoot"
    );
    let changes = [
        ("domain/devices/interfaces", json!([{"name": "a", "sriov": {}}])),
        ("networks", json!([{"name": "a", "multus": {"networkName": "a"}}])),
    ];
    assert_eq!(
        faults(&with(&changes))[0].field,
        "spec.domain.devices.interfaces[0].sriov"
    );
}

#[test]
fn kvm_features_that_ask_for_nothing_are_accepted() {
    for kvm in [json!({}), json!({"hidden": false})] {
        assert_eq!(
            faults(&with(&[("domain/features/kvm", kvm.clone())])),
            [],
            "{kvm}"
        );
    }
}

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
        let fields: Vec<&str> = plan.notes.iter().map(|note| note.field.as_str()).collect();
        assert_eq!(fields, [format!("spec.{field}").as_str()], "{:?}", plan.notes);
    }
}

#[test]
fn interfaces_that_are_met_differently_are_noted_by_path() {
    let noted = |interface: Value, pod: Value| {
        let mut nic = json!({"name": "a"});
        nic.as_object_mut()
            .unwrap()
            .extend(interface.as_object().unwrap().clone());
        let manifest = with(&[
            ("domain/devices/interfaces", json!([nic])),
            ("networks", json!([{"name": "a", "pod": pod}])),
        ]);
        let plan = plan(&vmi(&manifest), &resources(&[("root", "/r")])).unwrap();
        Vec::from_iter(plan.notes.into_iter().map(|note| note.field))
    };
    let path = "spec.domain.devices.interfaces[0]";
    for model in ["e1000", "e1000e", "igb", "ne2k_pci", "pcnet", "rtl8139"] {
        assert_eq!(
            noted(json!({"model": model}), json!({})),
            [format!("{path}.model")]
        );
    }
    for (name, value) in [
        ("tag", json!("t")),
        ("acpiIndex", json!(3)),
        ("ports", json!([{"port": 80}])),
    ] {
        assert_eq!(noted(json!({name: value}), json!({})), [format!("{path}.{name}")]);
    }
    for (name, cidr) in [
        ("vmNetworkCIDR", "10.1.0.0/24"),
        ("vmIPv6NetworkCIDR", "fd01::/120"),
    ] {
        let pod = json!({name: cidr});
        assert_eq!(
            noted(json!({"bridge": {}}), pod.clone()),
            [format!("spec.networks[0].pod.{name}")]
        );
        let served = json!({"masquerade": {}, "ports": [{"port": 80}], "model": "virtio"});
        assert_eq!(noted(served, pod), [""; 0]);
    }
}

#[test]
fn a_vm_that_would_be_started_again_is_not_in_silence() {
    for (given, field) in [
        ("runStrategy: Always", Some("spec.runStrategy")),
        ("runStrategy: RerunOnFailure", Some("spec.runStrategy")),
        ("running: true", Some("spec.running")),
        ("runStrategy: Once", None),
    ] {
        let text = DESKTOP
            .replace("running: false", given)
            .replace("cdrom: {bus: sata}", "disk: {bus: virtio}");
        assert!(text.contains(given));
        let all = husk_vmi::notes(&only(&text));
        let found: Vec<&str> = all
            .iter()
            .filter(|note| note.field.starts_with("spec.run"))
            .map(|note| note.field.as_str())
            .collect();
        assert_eq!(found, Vec::from_iter(field), "{given}");
    }
}

#[test]
fn a_container_disk_that_can_be_written_is_noted() {
    for (target, noted) in [
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
        let notes = husk_vmi::notes(&vmi(&manifest));
        let found = notes
            .iter()
            .any(|note| note.field == "spec.volumes[0].containerDisk");
        assert_eq!(found, noted, "{notes:?}");
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
        noted(&plan(&vmi(&manifest), &resources(&[("root", "/r")])).unwrap()),
        [] as [&str; 0]
    );
}
