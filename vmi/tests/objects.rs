//! A whole manifest: from its text to a VMI that validates.

use husk_vmi::instancetype::expand;
use husk_vmi::objects::{DataVolumeSource, ObjectKind, RunStrategy, read_objects};
use husk_vmi::{Loaded, load, validate, warnings};

const MANIFEST: &str = r#"
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineClusterInstancetype
metadata: {name: small}
spec: {cpu: {guest: 2}, memory: {guest: 2Gi}}
---
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachinePreference
metadata: {name: linux}
spec:
  devices: {preferredDiskBus: virtio, preferredInterfaceModel: virtio, preferredRng: {}}
  features: {preferredAcpi: {}, preferredSmm: {enabled: false}}
  firmware: {preferredUseEfi: true, preferredUseSecureBoot: false}
  requirements: {cpu: {guest: 1}, memory: {guest: 1Gi}}
---
apiVersion: v1
kind: Secret
metadata: {name: seed}
stringData:
  userdata: |
    #cloud-config
    ssh_authorized_keys: []
---
apiVersion: v1
kind: Service
metadata: {name: ssh}
spec: {ports: [{port: 22}]}
---
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: web}
spec:
  runStrategy: RerunOnFailure
  instancetype: {name: small}
  preference: {name: linux, kind: VirtualMachinePreference}
  dataVolumeTemplates:
  - metadata: {name: web-root}
    spec:
      storage: {resources: {requests: {storage: 10Gi}}}
      source: {registry: {url: "docker://quay.io/containerdisks/debian:13"}}
  template:
    spec:
      domain: {devices: {interfaces: [{name: default, masquerade: {}}]}}
      networks: [{name: default, pod: {}}]
      volumes:
      - {name: root, dataVolume: {name: web-root}}
      - {name: seed, cloudInitNoCloud: {secretRef: {name: seed}}}
"#;

#[test]
fn a_whole_manifest_becomes_a_vm() {
    let objects = read_objects(MANIFEST).unwrap();
    let kinds: Vec<_> = objects.iter().map(|object| &object.kind).collect();
    let [
        ObjectKind::Instancetype(_),
        ObjectKind::Preference(_),
        ObjectKind::Secret(secret),
        ObjectKind::Other(service),
        ObjectKind::VirtualMachine(vm),
    ] = kinds.as_slice()
    else {
        panic!("{kinds:?}")
    };
    assert!(secret.data["userdata"].starts_with(b"#cloud-config\n"));
    assert_eq!(service.to_string(), "Service ssh");
    assert_eq!(vm.run_strategy, RunStrategy::RerunOnFailure);

    let expansion = expand(vm, objects.as_slice()).unwrap();
    let [data] = expansion.data_volumes.as_slice() else {
        panic!()
    };
    assert!(matches!(&data.source, DataVolumeSource::Registry(registry)
        if registry.image == "quay.io/containerdisks/debian:13"));
    assert_eq!(data.claim.size, Some(10 << 30));

    let vmi = expansion.vmi;
    validate(&vmi).unwrap();
    assert_eq!(vmi.document.as_deref(), Some("web"));
    let devices = &vmi.spec.domain.devices;
    let buses: Vec<_> = devices
        .disks
        .iter()
        .map(|disk| disk.disk.as_ref().unwrap().bus.as_deref())
        .collect();
    assert_eq!(buses, [Some("virtio"), Some("virtio")]);
    // No firmware runs: the warning is that of the field in a manifest.
    let fields: Vec<_> = warnings(&vmi).into_iter().map(|warning| warning.field).collect();
    assert!(
        fields.contains(&"spec.template.spec.domain.firmware.bootloader.efi".to_owned()),
        "{fields:?}"
    );
}

#[test]
fn a_vm_that_runs_by_itself_still_has_neither() {
    let loaded = load(MANIFEST).unwrap();
    let Some(Loaded::Vmi(vmi)) = loaded.last() else {
        panic!()
    };
    let errors = validate(vmi).unwrap_err();
    let fields: Vec<_> = errors.iter().map(|error| error.field.as_str()).collect();
    assert!(
        fields.ends_with(&["spec.instancetype", "spec.preference"]),
        "{fields:?}"
    );
}

#[test]
fn only_one_of_many_documents_is_faulty() {
    let text = MANIFEST.replace("stringData:", "stringdata:");
    let error = read_objects(&text).unwrap_err().to_string();
    assert_eq!(
        error,
        "seed: stringdata: Invalid value: stringdata in body is a forbidden property"
    );
    assert!(load(&text).is_ok_and(|all| {
        all.iter()
            .any(|document| matches!(document, Loaded::Other { .. }))
    }));
}
