//! Disks and volumes of a manifest, and their entries in the plan.

#[path = "../common/mod.rs"]
mod common;
mod credentials;
mod disks;
mod hotplug;
mod volumes;

use std::path::PathBuf;

use common::{vmi, with};
use husk_vmi::{FieldError, PodResources, VmPlan, plan};
use serde_json::Value;

/// The caller's data for the volumes of these names.
fn given(volumes: &[(&str, &str)]) -> PodResources {
    PodResources {
        volumes: volumes
            .iter()
            .map(|(name, path)| ((*name).to_owned(), PathBuf::from(path)))
            .collect(),
        uuid: "11111111-2222-4333-8444-555555555555".parse().unwrap(),
        ..PodResources::default()
    }
}

/// The base with changes, planned with an image for its disk.
fn planned(changes: &[(&str, Value)]) -> Result<VmPlan, Vec<FieldError>> {
    plan(&vmi(&with(changes)), &given(&[("root", "/r.img")]))
}
