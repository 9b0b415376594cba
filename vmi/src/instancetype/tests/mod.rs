//! Expansion: what instance types and preferences write, and the errors.

mod conflicts;
mod infer;
mod preferences;
mod topology;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::objects::{Object, ObjectKind, read_objects};
use crate::{FieldError, validate, warnings};

/// An instance type with 4 vCPUs and 2 GiB, and a preference without wishes; both are changed by JSON pointers.
struct Case {
    vm: Value,
    instancetype: Option<Value>,
    preference: Option<Value>,
}

impl Case {
    /// A VM that names neither.
    fn plain() -> Self {
        let vm = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm"},
            "spec": {"runStrategy": "Always", "template": {"spec": {
                "domain": {"devices": {"disks": [{"name": "root", "disk": {}}]}},
                "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "root"}}],
            }}},
        });
        Self {
            vm,
            instancetype: None,
            preference: None,
        }
    }

    fn typed() -> Self {
        let mut case = Self::plain();
        case.vm["spec"]["instancetype"] = json!({"name": "type"});
        case.instancetype = Some(json!({"cpu": {"guest": 4}, "memory": {"guest": "2Gi"}}));
        case
    }

    fn preferring(preference: Value) -> Self {
        let mut case = Self::plain();
        case.prefer(preference);
        case
    }

    fn prefer(&mut self, preference: Value) {
        self.vm["spec"]["preference"] = json!({"name": "preference"});
        self.preference = Some(preference);
    }

    /// Sets a field of the VMI's spec, by a pointer.
    fn set(mut self, pointer: &str, value: Value) -> Self {
        put(&mut self.vm["spec"]["template"]["spec"], pointer, value);
        self
    }

    /// Sets a field of the instance type's spec, by a pointer.
    fn give(mut self, pointer: &str, value: Value) -> Self {
        put(self.instancetype.as_mut().unwrap(), pointer, value);
        self
    }

    fn objects(&self) -> Vec<Object> {
        let object = |kind: &str, name: &str, spec: &Value| {
            json!({
                "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": kind,
                "metadata": {"name": name}, "spec": spec,
            })
        };
        let mut text = self.vm.to_string();
        if let Some(spec) = &self.instancetype {
            text += &object("VirtualMachineClusterInstancetype", "type", spec).to_string();
        }
        if let Some(spec) = &self.preference {
            text += &object("VirtualMachineClusterPreference", "preference", spec).to_string();
        }
        read_objects(&text).unwrap()
    }

    fn expand(&self) -> Result<Expansion, Vec<FieldError>> {
        expand_first(&self.objects())
    }

    fn vmi(&self) -> Vmi {
        self.expand().unwrap().vmi
    }

    fn faults(&self) -> Vec<String> {
        lines(self.expand().unwrap_err())
    }

    /// The expanded template, as JSON.
    fn template(&self) -> Value {
        let mut template = self.vm["spec"]["template"].as_object().unwrap().clone();
        let spec = |spec: &Option<Value>| spec.clone();
        let instancetype: Option<InstancetypeSpec> =
            spec(&self.instancetype).map(|spec| serde_json::from_value(spec).unwrap());
        let preference: Option<PreferenceSpec> =
            spec(&self.preference).map(|spec| serde_json::from_value(spec).unwrap());
        apply_both(&mut template, instancetype.as_ref(), preference.as_ref()).unwrap();
        Value::Object(template)
    }
}

fn put(target: &mut Value, pointer: &str, value: Value) {
    let mut at = target;
    for step in pointer.split('/') {
        at = match step.parse::<usize>() {
            Ok(index) => &mut at[index],
            Err(_) => &mut at[step],
        };
    }
    *at = value;
}

fn expand_first(objects: &[Object]) -> Result<Expansion, Vec<FieldError>> {
    let vm = objects.iter().find_map(|object| match &object.kind {
        ObjectKind::VirtualMachine(vm) => Some(vm),
        _ => None,
    });
    expand(vm.unwrap(), objects)
}

fn lines(errors: Vec<FieldError>) -> Vec<String> {
    errors.iter().map(ToString::to_string).collect()
}

#[test]
fn a_vm_without_either_is_its_template() {
    let case = Case::plain().set("domain/memory", json!({"guest": "1Gi"}));
    let vmi = case.vmi();
    let loaded = match crate::load(&case.vm.to_string()).unwrap().remove(0) {
        crate::Loaded::Vmi(vmi) => *vmi,
        other => panic!("{other:?}"),
    };
    assert_eq!(vmi.spec, loaded.spec);
    assert!(vmi.spec.domain.firmware.uuid.is_some());
    // A caller that follows the run strategy needs no warning about it.
    assert_eq!(vmi.warnings.len() + 1, loaded.warnings.len());
    validate(&vmi).unwrap();
}

#[test]
fn an_instance_type_gives_cpu_and_memory() {
    let case = Case::typed()
        .give("cpu/model", json!("host-model"))
        .give("cpu/maxSockets", json!(8))
        .give("annotations", json!({"a": "b"}))
        .give("nodeSelector", json!({"zone": "1"}))
        .give("schedulerName", json!("mine"))
        .give("ioThreadsPolicy", json!("auto"));
    let vmi = case.vmi();
    let cpu = &vmi.spec.domain.cpu;
    assert_eq!(
        (cpu.sockets, cpu.cores, cpu.threads, cpu.max_sockets),
        (4, 1, 1, 8)
    );
    assert_eq!(vmi.spec.domain.memory.guest.unwrap().to_string(), "2Gi");
    assert_eq!(vmi.spec.domain.io_threads_policy.as_deref(), Some("auto"));
    assert_eq!(vmi.annotations["a"], "b");
    assert_eq!(vmi.annotations["kubevirt.io/cluster-instancetype-name"], "type");
    let plain = match crate::load(&Case::plain().vm.to_string()).unwrap().remove(0) {
        crate::Loaded::Vmi(vmi) => vmi.spec.domain.firmware.uuid,
        other => panic!("{other:?}"),
    };
    assert_eq!(vmi.spec.domain.firmware.uuid, plain);
    validate(&vmi).unwrap();
    let fields: Vec<_> = warnings(&vmi).into_iter().map(|warning| warning.field).collect();
    for field in [
        "nodeSelector",
        "schedulerName",
        "domain.ioThreadsPolicy",
        "domain.cpu.maxSockets",
    ] {
        assert!(fields.contains(&at(field)), "{field}: {fields:?}");
    }
}

#[test]
fn what_husk_lacks_is_refused_as_in_a_manifest() {
    let case = Case::typed()
        .give("gpus", json!([{"name": "g", "deviceName": "d"}]))
        .give("launchSecurity", json!({"sev": {}}))
        .give("cpu/dedicatedCPUPlacement", json!(true));
    let fields: Vec<_> = validate(&case.vmi())
        .unwrap_err()
        .into_iter()
        .map(|fault| fault.field)
        .collect();
    for field in [
        "domain.devices.gpus",
        "domain.launchSecurity",
        "domain.cpu.dedicatedCpuPlacement",
    ] {
        assert!(fields.contains(&at(field)), "{field}: {fields:?}");
    }
    let case =
        Case::preferring(json!({"devices": {"preferredTPM": {}}, "firmware": {"preferredUseEfi": true}}))
            .set("domain/memory", json!({"guest": "1Gi"}));
    let fields: Vec<_> = validate(&case.vmi())
        .unwrap_err()
        .into_iter()
        .map(|fault| fault.field)
        .collect();
    assert!(fields.contains(&at("domain.devices.tpm")), "{fields:?}");
    assert!(
        fields
            .iter()
            .any(|field| field.starts_with(&at("domain.firmware.bootloader.efi"))),
        "{fields:?}"
    );
}

#[test]
fn a_vm_can_do_without_the_preferred_tpm() {
    let case = Case::preferring(json!({"devices": {"preferredTPM": {"persistent": true}}}))
        .set("domain/memory", json!({"guest": "1Gi"}))
        .set("domain/devices/tpm", json!({"enabled": false}));
    validate(&case.vmi()).unwrap();
}

#[test]
fn overcommitted_memory_is_requested_in_part() {
    let case = Case::typed().give("memory/overcommitPercent", json!(25));
    let template = case.template();
    assert_eq!(
        template["spec"]["domain"]["resources"]["requests"]["memory"],
        json!("1610612736")
    );
    validate(&case.vmi()).unwrap();
}

#[test]
fn missing_objects_are_named() {
    let mut case = Case::plain();
    case.vm["metadata"]["namespace"] = json!("prod");
    case.vm["spec"]["instancetype"] = json!({"name": "small"});
    case.vm["spec"]["preference"] = json!({"name": "linux", "kind": "virtualmachinepreferences"});
    assert_eq!(
        case.faults(),
        [
            "spec.instancetype.name: Not found: virtualmachineclusterinstancetypes.instancetype.kubevirt.io \"small\" \
             not found; add it to the manifest",
            "spec.preference.name: Not found: virtualmachinepreferences.instancetype.kubevirt.io \"linux\" not found \
             in namespace prod; add it to the manifest",
        ]
    );
    case.vm["spec"]["instancetype"] = json!({"name": "small", "kind": "VirtualMachinePreference"});
    case.vm["spec"].as_object_mut().unwrap().remove("preference");
    assert_eq!(
        case.faults(),
        [
            "spec.instancetype.kind: Invalid value: got unexpected kind in InstancetypeMatcher: \
             VirtualMachinePreference"
        ]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_objects_make_expansion_panic(
        template in crate::objects::any_json(),
        instancetype in crate::objects::any_json(),
        preference in crate::objects::any_json(),
        guest in any::<u32>(),
        ratio in any::<u32>(),
        across in 0..3usize,
    ) {
        let mut case = Case::typed();
        case.prefer(json!({}));
        let mut objects = case.objects();
        for object in &mut objects {
            match &mut object.kind {
                ObjectKind::VirtualMachine(vm) if !template.is_null() => {
                    vm.template["spec"]["domain"]["devices"] = template.clone();
                    vm.template["metadata"] = template.clone();
                }
                ObjectKind::Instancetype(found) => {
                    found.spec.cpu.guest = guest;
                    found.spec.cpu.numa = Some(instancetype.clone());
                    found.spec.gpus = vec![instancetype.clone()];
                }
                ObjectKind::Preference(found) => {
                    found.spec.cpu.preferred_cpu_topology = Some("spread".to_owned());
                    found.spec.cpu.spread_options.ratio = Some(ratio % 5);
                    found.spec.cpu.spread_options.across = Some(spread::ACROSS[across].to_owned());
                    found.spec.cpu.preferred_cpu_features = vec![preference.clone()];
                    found.spec.devices = Map::from_iter([
                        ("preferredDiskBus".to_owned(), preference.clone()),
                        ("preferredPanicDeviceModel".to_owned(), preference.clone()),
                    ]);
                    found.spec.features = preference.as_object().cloned().unwrap_or_default();
                }
                _ => {}
            }
        }
        if let Err(errors) = expand_first(&objects) {
            prop_assert!(!errors.is_empty());
        }
    }

    #[test]
    fn no_template_makes_expansion_panic(template in crate::objects::any_json()) {
        let mut objects = Case::typed().objects();
        if let ObjectKind::VirtualMachine(vm) = &mut objects[0].kind {
            vm.template = template;
        }
        let _ = expand_first(&objects);
    }
}
