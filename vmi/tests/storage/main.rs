//! Disks and volumes of a manifest, and their entries in the plan.

#[path = "../common/mod.rs"]
mod common;
mod credentials;
mod disks;
mod hotplug;
mod volumes;

use common::{resources, vmi, with};
use husk_vmi::{FieldError, VmPlan, plan};
use serde_json::Value;

/// The base with changes, planned with an image for its disk.
fn planned(changes: &[(&str, Value)]) -> Result<VmPlan, Vec<FieldError>> {
    plan(&vmi(&with(changes)), &resources(&[("root", "/r.img")]))
}
