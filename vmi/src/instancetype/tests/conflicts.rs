//! Fields that VM and instance type give.

use super::*;

#[test]
fn a_field_that_both_give_is_a_conflict() {
    for (pointer, value, give, given, want) in [
        (
            "domain/cpu",
            json!({"sockets": 1}),
            "",
            json!(null),
            "domain.cpu.sockets",
        ),
        (
            "domain/cpu",
            json!({"cores": 1}),
            "",
            json!(null),
            "domain.cpu.cores",
        ),
        (
            "domain/cpu",
            json!({"threads": 1}),
            "",
            json!(null),
            "domain.cpu.threads",
        ),
        (
            "domain/cpu",
            json!({"model": "a"}),
            "cpu/model",
            json!("b"),
            "domain.cpu.model",
        ),
        (
            "domain/cpu",
            json!({"dedicatedCpuPlacement": true}),
            "cpu/dedicatedCPUPlacement",
            json!(false),
            "domain.cpu.dedicatedCPUPlacement",
        ),
        (
            "domain/cpu",
            json!({"numa": {}}),
            "cpu/numa",
            json!({}),
            "domain.cpu.numa",
        ),
        (
            "domain/cpu",
            json!({"realtime": {}}),
            "cpu/realtime",
            json!({}),
            "domain.cpu.realtime",
        ),
        (
            "domain/resources",
            json!({"requests": {"cpu": 1}}),
            "",
            json!(null),
            "domain.resources.requests.cpu",
        ),
        (
            "domain/resources",
            json!({"limits": {"cpu": 1}}),
            "",
            json!(null),
            "domain.resources.limits.cpu",
        ),
        (
            "domain/memory",
            json!({"guest": "1Gi"}),
            "",
            json!(null),
            "domain.memory.guest",
        ),
        (
            "domain/memory",
            json!({"hugepages": {"pageSize": "2Mi"}}),
            "memory/hugepages",
            json!({"pageSize": "2Mi"}),
            "domain.memory.hugepages",
        ),
        (
            "domain/memory",
            json!({"maxGuest": "4Gi"}),
            "memory/maxGuest",
            json!("4Gi"),
            "domain.memory.maxGuest",
        ),
        (
            "domain/resources",
            json!({"requests": {"memory": "1Gi"}}),
            "",
            json!(null),
            "domain.resources.requests.memory",
        ),
        (
            "domain/resources",
            json!({"limits": {"memory": "1Gi"}}),
            "",
            json!(null),
            "domain.resources.limits.memory",
        ),
        (
            "nodeSelector",
            json!({}),
            "nodeSelector",
            json!({"a": "b"}),
            "nodeSelector",
        ),
        (
            "schedulerName",
            json!("a"),
            "schedulerName",
            json!("b"),
            "schedulerName",
        ),
        (
            "domain/ioThreadsPolicy",
            json!("auto"),
            "ioThreadsPolicy",
            json!("auto"),
            "domain.ioThreadsPolicy",
        ),
        (
            "domain/ioThreads",
            json!({"supplementalPoolThreadCount": 1}),
            "ioThreads",
            json!({"supplementalPoolThreadCount": 2}),
            "domain.ioThreads.supplementalPoolThreadCount",
        ),
        (
            "domain/launchSecurity",
            json!({}),
            "launchSecurity",
            json!({}),
            "domain.launchSecurity",
        ),
        (
            "domain/devices/gpus",
            json!([{"name": "a"}]),
            "gpus",
            json!([{"name": "a"}]),
            "domain.devices.gpus",
        ),
        (
            "domain/devices/hostDevices",
            json!([{"name": "a"}]),
            "hostDevices",
            json!([{"name": "a"}]),
            "domain.devices.hostDevices",
        ),
    ] {
        let mut case = Case::typed().set(pointer, value);
        if !give.is_empty() {
            case = case.give(give, given);
        }
        let path = at(want);
        let want = format!("{path}: Invalid value: VM field(s) {path} conflicts with selected instance type");
        assert_eq!(case.faults(), [want]);
    }
}

#[test]
fn all_conflicts_are_reported_and_equal_annotations_are_none() {
    let mut case = Case::typed()
        .give("annotations", json!({"a": "1", "b": "2"}))
        .set("domain/cpu", json!({"cores": 1, "sockets": 1}))
        .set("domain/memory", json!({"guest": "1Gi"}));
    case.vm["spec"]["template"]["metadata"] = json!({"annotations": {"a": "1", "b": "3"}});
    let fields: Vec<_> = case
        .expand()
        .unwrap_err()
        .into_iter()
        .map(|fault| fault.field)
        .collect();
    assert_eq!(
        fields,
        [
            at("domain.cpu.sockets"),
            at("domain.cpu.cores"),
            at("domain.memory.guest"),
            "annotations.b".to_owned()
        ]
    );
}
