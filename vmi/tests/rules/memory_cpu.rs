//! Rules for memory and CPUs.

use super::common::{faults, refused, with};
use super::{INVALID, LIMIT, REQUEST, REQUIRED, UNSUPPORTED};
use serde_json::{Value, json};

fn memory(request: &str, more: &[(&'static str, Value)]) -> Vec<(&'static str, Value)> {
    let mut changes = vec![("domain/resources/requests/memory", json!(request))];
    changes.extend_from_slice(more);
    changes
}

#[test]
fn some_memory() {
    refused(
        &[("domain/resources", json!({}))],
        REQUIRED,
        "",
        "no memory requested, at least one of 'spec.domain.memory.guest', 'spec.domain.memory.hugepages.size' or \
         'spec.domain.resources.requests.memory' must be set",
    );
}

#[test]
fn at_least_a_megabyte() {
    refused(
        &memory("64Ki", &[]),
        INVALID,
        REQUEST,
        &format!("{REQUEST} '64Ki': must be greater than or equal to 1M."),
    );
}

#[test]
fn never_negative() {
    refused(
        &memory("-1Gi", &[]),
        INVALID,
        REQUEST,
        &format!("{REQUEST} '-1Gi': must be greater than or equal to 0."),
    );
    let limit = [("domain/resources/limits/memory", json!("-1"))];
    refused(
        &limit,
        INVALID,
        LIMIT,
        &format!("{LIMIT} '-1': must be greater than or equal to 0."),
    );
}

#[test]
fn request_within_limit() {
    let changes = memory("128Mi", &[("domain/resources/limits/memory", json!("64Mi"))]);
    refused(
        &changes,
        INVALID,
        REQUEST,
        &format!("{REQUEST} '128Mi' is greater than {LIMIT} '64Mi'"),
    );
}

#[test]
fn guest_may_exceed_the_limit() {
    let changes = [
        ("domain/resources/limits/memory", json!("128Mi")),
        ("domain/memory/guest", json!("129Mi")),
    ];
    assert_eq!(faults(&with(&changes)), []);
}

#[test]
fn huge_pages() {
    let field = "spec.domain.hugepages.size";
    let pages = |size: &str| ("domain/memory/hugepages/pageSize", json!(size));
    refused(
        &[pages("2Mx")],
        INVALID,
        field,
        &format!(
            "{field} '2Mx': quantities must match the regular expression \
             '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        ),
    );
    let text = format!("{REQUEST} '128Mi' must be equal to or larger than page size {field} '1Gi'");
    refused(&[pages("1Gi")], INVALID, REQUEST, &text);
    let text = format!("{REQUEST} '129Mi' is not a multiple of the page size {field} '2Mi'");
    refused(&memory("129Mi", &[pages("2Mi")]), INVALID, REQUEST, &text);
    // The limit has room for more than the guest's memory.
    let limit = ("domain/resources", json!({"limits": {"memory": "1500M"}}));
    let guest = ("domain/memory/guest", json!("1Gi"));
    assert_eq!(faults(&with(&[pages("2Mi"), limit.clone(), guest])), []);
    let text = format!("{REQUEST} '1500M' is not a multiple of the page size {field} '2Mi'");
    refused(&[pages("2Mi"), limit], INVALID, REQUEST, &text);
}

#[test]
fn cpu_resources() {
    let request = "spec.domain.resources.requests.cpu";
    let limit = "spec.domain.resources.limits.cpu";
    let text = format!("{request} '-200m': must be greater than or equal to 0.");
    refused(
        &[("domain/resources/requests/cpu", json!("-200m"))],
        INVALID,
        request,
        &text,
    );
    let text = format!("{limit} '-1': must be greater than or equal to 0.");
    refused(
        &[("domain/resources/limits/cpu", json!(-1))],
        INVALID,
        limit,
        &text,
    );
    let changes = [
        ("domain/resources/requests/cpu", json!("2500m")),
        ("domain/resources/limits/cpu", json!("500m")),
    ];
    refused(
        &changes,
        INVALID,
        request,
        &format!("{request} '2500m' is greater than {limit} '500m'"),
    );
}

#[test]
fn feature_policies() {
    refused(
        &[(
            "domain/cpu/features",
            json!([{"name": "lahf_lm", "policy": "invalid"}]),
        )],
        UNSUPPORTED,
        "spec.domain.cpu.features[0].policy",
        "CPU feature lahf_lm uses policy invalid that is not supported.",
    );
}

#[test]
fn isolated_emulator_thread() {
    refused(
        &[("domain/cpu/isolateEmulatorThread", json!(true))],
        INVALID,
        "spec.domain.cpu.isolateEmulatorThread",
        "IsolateEmulatorThread should be only set in combination with DedicatedCPUPlacement",
    );
}

#[test]
fn dedicated_cpus() {
    let cpu = "spec.domain.cpu.dedicatedCpuPlacement";
    let request = "spec.domain.resources.requests.cpu";
    let limit = "spec.domain.resources.limits.cpu";
    let dedicated = |resources: Value, cpu: Value| [("domain/cpu", cpu), ("domain/resources", resources)];
    let on = json!({"dedicatedCpuPlacement": true});
    let text = format!("{REQUEST} or {LIMIT} should be provided");
    refused(
        &dedicated(json!({"requests": {"cpu": 1}}), on.clone()),
        INVALID,
        LIMIT,
        &text,
    );
    let text = "provided resources CPU requests/limits must be an interger";
    refused(
        &dedicated(json!({"requests": {"cpu": "500m"}}), on.clone()),
        INVALID,
        request,
        text,
    );
    let text = format!("{REQUEST} must be equal to {LIMIT}");
    let resources = json!({"requests": {"memory": "64Mi"}, "limits": {"memory": "65Mi"}});
    refused(&dedicated(resources, on.clone()), INVALID, REQUEST, &text);
    let text = format!(
        "either {request} or {limit} or spec.domain.cpu.cores must be provided when DedicatedCPUPlacement is true"
    );
    refused(
        &dedicated(json!({"requests": {"memory": "64Mi"}}), on.clone()),
        INVALID,
        cpu,
        &text,
    );
    let text = format!("{request} or {limit} must be equal when DedicatedCPUPlacement is true");
    refused(
        &dedicated(json!({"requests": {"cpu": 2}, "limits": {"cpu": 4}}), on.clone()),
        INVALID,
        cpu,
        &text,
    );
    let cores = json!({"dedicatedCpuPlacement": true, "cores": 2, "threads": 3});
    let text = format!(
        "{request} or {limit} must not be provided at the same time with spec.domain.cpu.cores when \
         DedicatedCPUPlacement is true"
    );
    refused(
        &dedicated(json!({"requests": {"cpu": 2}}), cores.clone()),
        INVALID,
        cpu,
        &text,
    );
    let text = "Not more than two threads must be provided at spec.domain.cpu.threads (got 3) when \
                DedicatedCPUPlacement is true";
    refused(
        &dedicated(json!({"requests": {"memory": "64Mi"}}), cores),
        INVALID,
        cpu,
        text,
    );
}

#[test]
fn sockets_within_maximum() {
    refused(
        &[("domain/cpu", json!({"sockets": 8, "maxSockets": 4}))],
        INVALID,
        "spec.domain.cpu.sockets",
        "Number of sockets in CPU topology is greater than the maximum sockets allowed",
    );
}
