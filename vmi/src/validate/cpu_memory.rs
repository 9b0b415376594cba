//! Rules on CPU and memory.

use crate::field::FieldError;
use crate::load::Vmi;
use crate::quantity::Quantity;

pub(super) fn check(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    memory(vmi, errors);
    hugepages(vmi, errors);
    cpu_resources(vmi, errors);
    cpu_features(vmi, errors);
    dedicated(vmi, errors);
    let cpu = &vmi.spec.domain.cpu;
    if cpu.max_sockets != 0 && cpu.sockets > cpu.max_sockets {
        let text = "Number of sockets in CPU topology is greater than the maximum sockets allowed";
        errors.push(FieldError::invalid(vmi.at("domain.cpu.sockets"), text));
    }
}

/// A request or limit that is not zero, with its path.
fn resource(vmi: &Vmi, list: &str, name: &str) -> (String, Option<Quantity>) {
    let resources = &vmi.spec.domain.resources;
    let map = if list == "limits" {
        &resources.limits
    } else {
        &resources.requests
    };
    (
        vmi.at(&format!("domain.resources.{list}.{name}")),
        map.get(name).copied().filter(|q| *q != Quantity::from_value(0)),
    )
}

fn not_negative(path: &str, quantity: Option<Quantity>, errors: &mut Vec<FieldError>) {
    if let Some(quantity) = quantity.filter(|quantity| quantity.is_negative()) {
        let text = format!("{path} '{quantity}': must be greater than or equal to 0.");
        errors.push(FieldError::invalid(path, text));
    }
}

fn within_limit(
    request: &(String, Option<Quantity>),
    limit: &(String, Option<Quantity>),
    errors: &mut Vec<FieldError>,
) {
    if let (Some(asked), Some(most)) = (request.1, limit.1)
        && !most.is_negative()
        && asked > most
    {
        let text = format!("{} '{asked}' is greater than {} '{most}'", request.0, limit.0);
        errors.push(FieldError::invalid(&request.0, text));
    }
}

fn memory(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let request = resource(vmi, "requests", "memory");
    let limit = resource(vmi, "limits", "memory");
    let memory = &vmi.spec.domain.memory;
    if request.1.is_none() && limit.1.is_none() && memory.guest.is_none() && memory.hugepages.is_none() {
        let text = format!(
            "no memory requested, at least one of '{}', '{}' or '{}' must be set",
            vmi.at("domain.memory.guest"),
            vmi.at("domain.memory.hugepages.size"),
            request.0
        );
        errors.push(FieldError::required("", text));
    }
    if let Some(asked) = request.1
        && !asked.is_negative()
        && asked < Quantity::from_value(1_000_000)
    {
        let text = format!("{} '{asked}': must be greater than or equal to 1M.", request.0);
        errors.push(FieldError::invalid(&request.0, text));
    }
    not_negative(&request.0, request.1, errors);
    not_negative(&limit.0, limit.1, errors);
    within_limit(&request, &limit, errors);
}

fn hugepages(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let memory = &vmi.spec.domain.memory;
    let Some(pages) = &memory.hugepages else { return };
    // The path that KubeVirt reports.
    let path = vmi.at("domain.hugepages.size");
    let size = &pages.page_size;
    let page = match size.parse::<Quantity>() {
        Ok(page) if page > Quantity::from_value(0) => page,
        Ok(_) => {
            let text = format!("{path} '{size}': must be greater than 0.");
            return errors.push(FieldError::invalid(path, text));
        }
        Err(error) => {
            let text = format!("{path} '{size}': {error}");
            return errors.push(FieldError::invalid(path, text));
        }
    };
    let (request, asked) = resource(vmi, "requests", "memory");
    let Some(asked) = asked.or(memory.guest).or(resource(vmi, "limits", "memory").1) else {
        return;
    };
    if asked < page {
        let text = format!("{request} '{asked}' must be equal to or larger than page size {path} '{size}'");
        errors.push(FieldError::invalid(request, text));
    } else if asked.value() % page.value() != 0 {
        let text = format!("{request} '{asked}' is not a multiple of the page size {path} '{size}'");
        errors.push(FieldError::invalid(request, text));
    }
}

fn cpu_resources(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let request = resource(vmi, "requests", "cpu");
    let limit = resource(vmi, "limits", "cpu");
    not_negative(&request.0, request.1, errors);
    not_negative(&limit.0, limit.1, errors);
    within_limit(&request, &limit, errors);
}

fn cpu_features(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    for (i, feature) in vmi.spec.domain.cpu.features.iter().enumerate() {
        let policy = feature.policy.as_deref().unwrap_or_default();
        if !matches!(
            policy,
            "" | "force" | "require" | "optional" | "disable" | "forbid"
        ) {
            let text = format!(
                "CPU feature {} uses policy {policy} that is not supported.",
                feature.name
            );
            errors.push(FieldError::unsupported(
                vmi.at(&format!("domain.cpu.features[{i}].policy")),
                text,
            ));
        }
    }
}

fn dedicated(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let cpu = &vmi.spec.domain.cpu;
    if cpu.isolate_emulator_thread && !cpu.dedicated_cpu_placement {
        let text = "IsolateEmulatorThread should be only set in combination with DedicatedCPUPlacement";
        errors.push(FieldError::invalid(
            vmi.at("domain.cpu.isolateEmulatorThread"),
            text,
        ));
    }
    if !cpu.dedicated_cpu_placement {
        return;
    }
    let path = vmi.at("domain.cpu.dedicatedCpuPlacement");
    let (memory_request, memory_asked) = resource(vmi, "requests", "memory");
    let (memory_limit, memory_most) = resource(vmi, "limits", "memory");
    match (memory_asked, memory_most) {
        (None, None) => {
            let text = format!("{memory_request} or {memory_limit} should be provided");
            errors.push(FieldError::invalid(&memory_limit, text));
        }
        (Some(asked), Some(most)) if asked != most => {
            let text = format!("{memory_request} must be equal to {memory_limit}");
            errors.push(FieldError::invalid(&memory_request, text));
        }
        _ => {}
    }
    let (request, asked) = resource(vmi, "requests", "cpu");
    let (limit, most) = resource(vmi, "limits", "cpu");
    for (path, quantity) in [(&request, asked), (&limit, most)] {
        if quantity.is_some_and(|quantity| !quantity.is_whole()) {
            errors.push(FieldError::invalid(
                path,
                "provided resources CPU requests/limits must be an interger",
            ));
        }
    }
    let cores = vmi.at("domain.cpu.cores");
    let mut refuse = |text: String| errors.push(FieldError::invalid(&path, text));
    match (asked, most) {
        (None, None) if cpu.cores == 0 => refuse(format!(
            "either {request} or {limit} or {cores} must be provided when DedicatedCPUPlacement is true"
        )),
        (Some(asked), Some(most)) if asked != most => {
            refuse(format!(
                "{request} or {limit} must be equal when DedicatedCPUPlacement is true"
            ));
        }
        _ => {}
    }
    if (asked.is_some() || most.is_some()) && cpu.cores > 0 {
        refuse(format!(
            "{request} or {limit} must not be provided at the same time with {cores} when DedicatedCPUPlacement is true"
        ));
    }
    if cpu.threads > 2 {
        refuse(format!(
            "Not more than two threads must be provided at {} (got {}) when DedicatedCPUPlacement is true",
            vmi.at("domain.cpu.threads"),
            cpu.threads
        ));
    }
}
