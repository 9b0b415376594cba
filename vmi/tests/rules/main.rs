//! Every admission rule: the manifest that breaks it, the reason, the field and the exact text.

#[path = "../common/mod.rs"]
mod common;
mod credentials;
mod disks;
mod interfaces;
mod limits;
mod machine;
mod memory_cpu;
mod network;
mod volumes;

use common::{faults, with};
use serde_json::{Value, json};

const INVALID: &str = "FieldValueInvalid";
const REQUIRED: &str = "FieldValueRequired";
const DUPLICATE: &str = "FieldValueDuplicate";
const UNSUPPORTED: &str = "FieldValueNotSupported";
const MISSING: &str = "FieldValueNotFound";

const REQUEST: &str = "spec.domain.resources.requests.memory";
const LIMIT: &str = "spec.domain.resources.limits.memory";
const DISK: &str = "spec.domain.devices.disks[0]";
const NIC: &str = "spec.domain.devices.interfaces[0]";

#[test]
fn the_base_has_no_fault() {
    assert_eq!(faults(&with(&[])), []);
}

fn volumes(list: Value) -> [(&'static str, Value); 2] {
    [("volumes", list), ("domain/devices/disks", json!([]))]
}
