//! KubeVirt's admission rules, and what of a valid VMI is not supported.
//!
//! Rules stand in the order and carry the texts and paths KubeVirt v1.1 gives them. Two kinds are left out: rules on
//! feature gates and on a cluster's objects (there is no cluster), and "volume not found" for a volume without a disk
//! (it is given a disk).

mod cpu_memory;
mod disks;
mod dns;
mod interfaces;
mod limits;
mod machine;
mod network;
mod support;
mod volumes;

use crate::field::{FieldError, Note};
use crate::load::Vmi;
use crate::plan::limits::{check_limits, check_sizes};

use support::support;

/// Checks a VMI against KubeVirt's rules and against what is supported and possible, and reports every fault that the
/// manifest alone tells.
///
/// # Errors
/// One [`FieldError`] for each fault, never an empty list.
pub fn validate(vmi: &Vmi) -> Result<(), Vec<FieldError>> {
    let mut errors = Vec::new();
    volumes::check(vmi, &mut errors);
    let before = errors.len();
    cpu_memory::check(vmi, &mut errors);
    if errors.len() == before {
        check_sizes(vmi, &mut errors);
    }
    disks::check(vmi, &mut errors);
    network::check(vmi, &mut errors);
    interfaces::check(vmi, &mut errors);
    machine::check(vmi, &mut errors);
    dns::check(vmi, &mut errors);
    errors.extend(vmi.unsupported.iter().cloned());
    errors.extend(support(vmi).unsupported);
    for limit in check_limits(vmi) {
        // KubeVirt's word on a field is enough.
        if !errors.iter().any(|error| error.field == limit.field) {
            errors.push(limit);
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// What a valid VMI asks for that is met differently, as far as the manifest alone tells;
/// [`VmPlan::notes`](crate::VmPlan::notes) has these and what depends on the caller.
pub fn notes(vmi: &Vmi) -> Vec<Note> {
    let mut notes = vmi.notes.clone();
    notes.extend(support(vmi).notes);
    notes
}
