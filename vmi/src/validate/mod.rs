//! KubeVirt's admission rules, and checks for unsupported values.
//!
//! The rules have the order, texts and paths of KubeVirt v1.1. Omitted are rules on feature gates and other objects of a
//! cluster, rules that newer versions do not apply, and "volume not found" for a volume without a disk, which gets a
//! disk instead.

mod cpu_memory;
mod credentials;
mod disks;
mod dns;
mod interfaces;
mod limits;
mod machine;
mod network;
mod support;
mod volumes;

use crate::field::{FieldError, Warning};
use crate::load::Vmi;
use crate::plan::limits::{check_limits, check_sizes};

use support::support;

pub(crate) use interfaces::ipv4;

/// Checks a VMI against KubeVirt's rules, the supported values and the limits. Reports all errors that depend on the
/// manifest alone.
///
/// # Errors
/// One [`FieldError`] for each error; never an empty list.
pub fn validate(vmi: &Vmi) -> Result<(), Vec<FieldError>> {
    // The other rules take time that grows with the square of the lengths.
    let mut errors = limits::lists(vmi);
    if !errors.is_empty() {
        return Err(errors);
    }
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
    credentials::check(vmi, &mut errors);
    errors.extend(vmi.unsupported.iter().cloned());
    errors.extend(support(vmi).unsupported);
    for limit in check_limits(vmi) {
        // KubeVirt's rules have reported the field already.
        if !errors.iter().any(|error| error.field == limit.field) {
            errors.push(limit);
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// Warnings about a valid VMI that depend on the manifest alone. [`VmPlan::warnings`](crate::VmPlan::warnings) has
/// these and those that depend on the caller.
pub fn warnings(vmi: &Vmi) -> Vec<Warning> {
    let mut warnings = vmi.warnings.clone();
    warnings.extend(support(vmi).warnings);
    warnings
}
