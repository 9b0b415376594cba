//! VirtualMachines, instance types and preferences.

use super::*;

fn vm(spec: Value) -> Value {
    let mut whole = json!({
        "runStrategy": "Always",
        "template": {"spec": {
            "domain": {"devices": {}},
            "volumes": [{"name": "root", "dataVolume": {"name": "root"}}],
        }},
    });
    merge(&mut whole, spec);
    let metadata = json!({"name": "vm", "namespace": "ns"});
    json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": metadata, "spec": whole})
}

#[test]
fn virtual_machines_are_kept_whole() {
    let storage = json!({"resources": {"requests": {"storage": "1Gi"}}});
    let metadata = json!({"name": "root", "labels": {"a": "b"}});
    let template = json!({"metadata": metadata, "spec": {"source": {"blank": {}}, "storage": storage}});
    let ObjectKind::VirtualMachine(read) = one(&vm(json!({
        "dataVolumeTemplates": [template],
        "instancetype": {"name": "small"},
        "preference": {"inferFromVolume": "root", "inferFromVolumeFailurePolicy": "IgnoreInferFromVolumeFailure"},
    }))) else {
        panic!()
    };
    assert_eq!(read.run_strategy, RunStrategy::Always);
    assert_eq!(read.data_volume_templates[0].metadata.namespace, "ns");
    assert_eq!(read.instancetype.unwrap().name, "small");
    assert_eq!(
        read.preference.unwrap().infer_from_volume_failure_policy,
        InferFromVolumeFailurePolicy::Ignore
    );
    let of_namespace = |namespace: &str| {
        let mut template = template.clone();
        template["metadata"]["namespace"] = namespace.into();
        json!({"dataVolumeTemplates": [template]})
    };
    for namespace in ["", "ns"] {
        assert_eq!(faults(&vm(of_namespace(namespace))), [""; 0]);
    }
    let renamed = |name: Value| {
        let mut template = template.clone();
        template["metadata"]["name"] = name;
        json!({"dataVolumeTemplates": [template]})
    };
    for (spec, want) in [
        (
            json!({"running": true}),
            "spec.running: Invalid value: Running and RunStrategy are mutually exclusive",
        ),
        (
            json!({"runStrategy": "Ever"}),
            "spec.runStrategy: Invalid value: Invalid RunStrategy (Ever)",
        ),
        (
            json!({"instancetype": {}}),
            "spec.instancetype: Not found: Either Name or InferFromVolume should be provided within the \
             InstancetypeMatcher",
        ),
        (
            json!({"preference": {"name": "a", "inferFromVolume": "root"}}),
            "spec.preference.name: Unsupported value: Name already set, should be cleared before setting \
             inferFromVolume",
        ),
        (
            json!({"preference": {"kind": "a", "inferFromVolume": "root"}}),
            "spec.preference.kind: Unsupported value: Kind already set, should be cleared before setting \
             inferFromVolume",
        ),
        (
            json!({"preference": {"name": "a", "inferFromVolumeFailurePolicy": "x"}}),
            "spec.preference.inferFromVolumeFailurePolicy: Invalid value: Invalid value 'x' for \
             InferFromVolumeFailurePolicy",
        ),
        (
            renamed(json!("")),
            "spec.dataVolumeTemplate[0].name: Required value: 'name' field must not be empty for DataVolumeTemplate \
             entry spec.dataVolumeTemplate[0].name.",
        ),
        (
            renamed(json!("other")),
            "spec.dataVolumeTemplate[0]: Required value: DataVolumeTemplate entry spec.dataVolumeTemplate[0] must be \
             referenced in the VMI template's 'volumes' list",
        ),
        (
            of_namespace("prod"),
            "spec.dataVolumeTemplates[0]: Invalid value: Embedded DataVolume namespace prod differs from VM namespace \
             ns",
        ),
        (
            json!({"template": {"spec": {"domain": {"devices": {}, "cpus": 1}}}}),
            "spec.template.spec.domain.cpus: Invalid value: spec.template.spec.domain.cpus in body is a forbidden \
             property",
        ),
        (
            json!({"template": {}}),
            "spec.template.spec: Required value: spec.template.spec in body is required",
        ),
    ] {
        only_fault(&vm(spec), want);
    }
    assert!(
        faults(&vm(json!({"instancetype": {"name": "a", "revisionName": "r"}})))[0]
            .starts_with("spec.instancetype.revisionName")
    );
    let bad = json!({"metadata": {"name": "root"}, "spec": {"source": {"http": {"url": ""}}, "storage": {}}});
    assert_eq!(faults(&vm(json!({"dataVolumeTemplates": [bad]}))).len(), 2);
}

#[test]
fn instance_types_and_preferences_are_checked() {
    let object = |kind: &str, spec: Value| {
        let version = "instancetype.kubevirt.io/v1beta1";
        json!({"apiVersion": version, "kind": kind, "metadata": {"name": "a"}, "spec": spec})
    };
    let ObjectKind::Instancetype(read) = one(&object(
        "VirtualMachineClusterInstancetype",
        json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}, "gpus": [{"name": "g", "deviceName": "d"}]}),
    )) else {
        panic!()
    };
    assert_eq!(read.metadata.namespace, "");
    assert_eq!(read.spec.cpu.guest, 2);
    for (spec, want) in [
        (
            json!({"memory": {"guest": 1}}),
            "spec.cpu: Required value: spec.cpu in body is required",
        ),
        (
            json!({"cpu": {"guest": 1}, "memory": {"guest": 1, "overcommitPercent": 101}}),
            "spec.memory.overcommitPercent: Invalid value: spec.memory.overcommitPercent in body should be less than \
             or equal to 100",
        ),
        (
            json!({
                "cpu": {"guest": 1},
                "memory": {"guest": 1, "overcommitPercent": 5, "hugepages": {"pageSize": "2Mi"}},
            }),
            "spec.memory.overcommitPercent: Invalid value: spec.memory.overcommitPercent and spec.memory.hugepages \
             should not be requested together.",
        ),
    ] {
        only_fault(&object("VirtualMachineInstancetype", spec), want);
    }
    let spread =
        |options: Value| json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": options}});
    for (spec, want) in [
        (
            json!({"cpu": {"preferredCPUTopology": "dies"}}),
            "spec.cpu.preferredCPUTopology: Invalid value: unknown preferredCPUTopology dies",
        ),
        (
            spread(json!({"across": "Dies"})),
            "spec.cpu.spreadOptions.across: Invalid value: across Dies is not supported",
        ),
        (
            spread(json!({"across": "CoresThreads", "ratio": 4})),
            "spec.cpu.spreadOptions.ratio: Invalid value: only a ratio of 2 (1 core 2 threads) is allowed when \
             spreading vCPUs over cores and threads",
        ),
        (
            spread(json!({"ratio": 0})),
            "spec.cpu.spreadOptions.ratio: Invalid value: must be greater than zero",
        ),
    ] {
        only_fault(&object("VirtualMachinePreference", spec), want);
    }
}
