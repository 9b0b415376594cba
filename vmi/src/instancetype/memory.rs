//! Memory of an instance type.

use serde_json::json;

use super::apply::conflict;
use super::at;
use super::json::{Object, below, edit, set};
use crate::field::FieldError;
use crate::types::MemoryInstancetype;

pub(super) fn apply(instancetype: &MemoryInstancetype, domain: &mut Object, conflicts: &mut Vec<FieldError>) {
    if let Some(field) = conflicting(instancetype, domain) {
        conflicts.push(conflict(&at(&format!("domain.{field}"))));
        return;
    }
    let quantity =
        |quantity: Option<crate::quantity::Quantity>| quantity.map(|quantity| quantity.to_string());
    edit(domain, "memory", |memory| {
        set(memory, "guest", quantity(instancetype.guest));
        let hugepages = instancetype.hugepages.as_ref();
        set(
            memory,
            "hugepages",
            hugepages.map(|pages| json!({"pageSize": pages.page_size})),
        );
        set(memory, "maxGuest", quantity(instancetype.max_guest));
    });
    if let (1.., Some(guest)) = (instancetype.overcommit_percent, instancetype.guest) {
        let requested = overcommitted(guest.value(), instancetype.overcommit_percent);
        edit(domain, "resources", |resources| {
            edit(resources, "requests", |requests| {
                set(requests, "memory", Some(requested.to_string()));
            });
        });
    }
}

/// The memory that the pod requests, with KubeVirt's rounding: in single precision.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "as KubeVirt computes it"
)]
fn overcommitted(guest: i64, percent: u8) -> i64 {
    (guest as f32 * (1.0 - f32::from(percent) / 100.0)) as i64
}

/// The first field of the VMI that the instance type gives.
fn conflicting(instancetype: &MemoryInstancetype, domain: &Object) -> Option<&'static str> {
    let given = |path: &[&str]| below(domain, path).is_some();
    [
        ("memory.guest", given(&["memory", "guest"])),
        (
            "memory.hugepages",
            instancetype.hugepages.is_some() && given(&["memory", "hugepages"]),
        ),
        (
            "memory.maxGuest",
            instancetype.max_guest.is_some() && given(&["memory", "maxGuest"]),
        ),
        (
            "resources.requests.memory",
            given(&["resources", "requests", "memory"]),
        ),
        (
            "resources.limits.memory",
            given(&["resources", "limits", "memory"]),
        ),
    ]
    .into_iter()
    .find_map(|(field, conflicts)| conflicts.then_some(field))
}
