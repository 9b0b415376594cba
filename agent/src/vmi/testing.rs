//! A recorded VMI.

use serde_json::{Value, json};

/// The node of the VMIs.
pub const NODE: &str = "node1";

/// A VMI as virt-controller leaves it to the agent, with the pod `NAME-pod`.
pub fn scheduled(name: &str) -> Value {
    let recorded = include_str!("../../../tests/manifests/vmi-scheduled.json");
    let mut vmi: Value = serde_json::from_str(recorded).unwrap();
    vmi["metadata"]["name"] = json!(name);
    vmi["metadata"]["uid"] = json!(format!("{name}-uid"));
    vmi["status"]["activePods"] = json!({format!("{name}-pod"): NODE});
    vmi
}
