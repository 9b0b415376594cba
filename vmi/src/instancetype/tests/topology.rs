//! Preferred topologies, and what preferences require.

use super::*;

#[test]
fn vcpus_have_the_preferred_topology() {
    let spread =
        |options: Value| json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": options}});
    for (vcpus, preference, want) in [
        (4, json!({}), (4, 1, 1)),
        (
            4,
            json!({"cpu": {"preferredCPUTopology": "preferSockets"}}),
            (4, 1, 1),
        ),
        (4, json!({"cpu": {"preferredCPUTopology": "any"}}), (4, 1, 1)),
        (
            4,
            json!({"cpu": {"preferredCPUTopology": "preferCores"}}),
            (1, 4, 1),
        ),
        (4, json!({"cpu": {"preferredCPUTopology": "threads"}}), (1, 1, 4)),
        (1, json!({"cpu": {"preferredCPUTopology": "cores"}}), (1, 1, 1)),
        (8, spread(json!({})), (4, 2, 1)),
        (8, spread(json!({"ratio": 4})), (2, 4, 1)),
        (8, spread(json!({"across": "CoresThreads"})), (1, 4, 2)),
        (8, spread(json!({"across": "SocketsCoresThreads"})), (2, 2, 2)),
        (
            8,
            json!({"cpu": {"preferredCPUTopology": "preferSpread"}, "preferSpreadSocketToCoreRatio": 4}),
            (2, 4, 1),
        ),
    ] {
        let mut case = Case::typed().give("cpu/guest", json!(vcpus));
        case.prefer(preference.clone());
        let cpu = case.vmi().spec.domain.cpu;
        assert_eq!((cpu.sockets, cpu.cores, cpu.threads), want, "{preference}");
    }
    let start = "instancetype.spec.cpu.guest: Invalid value: 5 vCPUs provided by the instance type are not divisible \
                 by the";
    let ratio = "Spec.PreferSpreadSocketToCoreRatio or Spec.CPU.PreferSpreadOptions.Ratio of 2";
    for (across, want) in [
        (
            "SocketsCores",
            format!("{start} {ratio} provided by the preference"),
        ),
        ("CoresThreads", format!("{start} number of threads per core 2")),
        (
            "SocketsCoresThreads",
            format!("{start} number of threads per core 2 and {ratio}"),
        ),
    ] {
        let mut case = Case::typed().give("cpu/guest", json!(5));
        case.prefer(spread(json!({"across": across})));
        assert_eq!(case.faults(), [want]);
    }
}

#[test]
fn requirements_are_checked() {
    let cpus = |topology: &str, guest: u32| {
        let cpu = json!({"preferredCPUTopology": topology});
        json!({"requirements": {"cpu": {"guest": guest}}, "cpu": cpu})
    };
    let memory = |guest: &str| json!({"requirements": {"memory": {"guest": guest}}});
    let path = |field: &str| at(&format!("domain.cpu.{field}"));
    let lacking = |given: u32, least: u32, name: &str| {
        format!(
            "insufficient CPU resources of {given} vCPU provided by VirtualMachine, preference requires {least} \
             vCPU provided as {name}"
        )
    };
    for (typed, cpu, preference, field, want) in [
        (
            true,
            json!(null),
            cpus("sockets", 5),
            "spec.instancetype".to_owned(),
            "insufficient CPU resources of 4 vCPU provided by instance type, preference requires 5 vCPU"
                .to_owned(),
        ),
        (
            true,
            json!(null),
            memory("3Gi"),
            "spec.instancetype".to_owned(),
            "insufficient Memory resources of 2Gi provided by instance type, preference requires 3Gi"
                .to_owned(),
        ),
        (
            false,
            json!(null),
            memory("3Gi"),
            at("domain.memory"),
            "insufficient Memory resources of 0 provided by VirtualMachine, preference requires 3Gi"
                .to_owned(),
        ),
        (
            false,
            json!(null),
            cpus("sockets", 2),
            path("sockets"),
            lacking(1, 2, "sockets"),
        ),
        (
            false,
            json!({"sockets": 8, "cores": 2}),
            cpus("cores", 4),
            path("cores"),
            lacking(2, 4, "cores"),
        ),
        (
            false,
            json!({"threads": 2}),
            cpus("threads", 4),
            path("threads"),
            lacking(2, 4, "threads"),
        ),
        (
            false,
            json!({"sockets": 2, "cores": 2, "threads": 1}),
            cpus("any", 5),
            format!("{}, {}, {}", path("cores"), path("sockets"), path("threads")),
            lacking(4, 5, "cores, sockets and threads"),
        ),
        (
            false,
            json!({"sockets": 2, "cores": 2}),
            cpus("spread", 5),
            format!("{}, {}", path("sockets"), path("cores")),
            lacking(4, 5, "SocketsCores"),
        ),
        (
            false,
            json!(null),
            json!({"requirements": {"architecture": "arm64"}}),
            at("architecture"),
            "preference requires architecture arm64 but amd64 is being requested".to_owned(),
        ),
    ] {
        let mut case = if typed { Case::typed() } else { Case::plain() };
        case.prefer(preference);
        if !cpu.is_null() {
            case = case.set("domain/cpu", cpu);
        }
        let want = format!("{field}: Not found: failure checking preference requirements: {want}");
        assert_eq!(case.faults(), [want]);
    }
    let mut met = Case::typed();
    met.prefer(
        json!({"requirements": {"cpu": {"guest": 4}, "memory": {"guest": "2Gi"}, "architecture": "amd64"}}),
    );
    met.vmi();
    let resources = json!({"requests": {"memory": "3Gi", "cpu": "1500m"}});
    let met = Case::preferring(json!({"requirements": {"cpu": {"guest": 2}, "memory": {"guest": "3Gi"}}}));
    met.set("domain/resources", resources).vmi();
}
