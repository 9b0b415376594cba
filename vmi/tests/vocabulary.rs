//! Manifests in KubeVirt's whole vocabulary: what is honoured, what is warned about and what is refused.

mod common;

use common::{faults, resources, warnings_of, with};
use husk_vmi::{BootPlan, DeviceType, DiskSource, Loaded, Topology, VmPlan, load, plan};
use serde_json::json;

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
        warnings_of(&plan),
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
    let fields: Vec<&str> = plan
        .warnings
        .iter()
        .map(|warning| warning.field.as_str())
        .collect();
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
fn a_run_strategy_that_restarts_is_reported() {
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
        let all = husk_vmi::warnings(&only(&text));
        let found: Vec<&str> = all
            .iter()
            .filter(|warning| warning.field.starts_with("spec.run"))
            .map(|warning| warning.field.as_str())
            .collect();
        assert_eq!(found, Vec::from_iter(field), "{given}");
    }
}
