//! Labels of the node for the scheduler. virt-controller selects nodes by them.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::cpu::Cpu;

/// The annotation that keeps labels from being changed.
pub(super) const SKIP_NODE: &str = "node-labeller.kubevirt.io/skip-node";
/// Machine types of VMIs: virt-api's default. A VMI's status has no other, since each there must be a label.
const MACHINE_TYPES: [&str; 1] = ["q35"];
/// Prefixes of labels that only a node's agent sets.
const OWN_PREFIXES: [&str; 9] = [
    "cpu-feature.node.kubevirt.io/",
    "cpu-model-migration.node.kubevirt.io/",
    "cpu-model.node.kubevirt.io/",
    "cpu-timer.node.kubevirt.io/",
    "cpu-vendor.node.kubevirt.io/",
    "host-model-cpu.node.kubevirt.io/",
    "host-model-required-features.node.kubevirt.io/",
    "hyperv.node.kubevirt.io/",
    "machine-type.node.kubevirt.io/",
];

/// Returns the labels of a node with this processor.
pub(super) fn wanted(cpu: &Cpu) -> BTreeMap<String, String> {
    let types = MACHINE_TYPES.map(|machine| format!("machine-type.node.kubevirt.io/{machine}"));
    let vendor = cpu
        .vendor
        .map(|vendor| format!("cpu-vendor.node.kubevirt.io/{vendor}"));
    let features = cpu.features.iter();
    let features = features.map(|feature| format!("cpu-feature.node.kubevirt.io/{feature}"));
    let keys = types.into_iter().chain(vendor).chain(features);
    keys.map(|key| (key, "true".to_owned())).collect()
}

/// Returns a merge patch that leaves the node with the wanted labels; `None` if it has them. Other labels stay.
pub(super) fn patch(present: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>) -> Option<Value> {
    let own = |key: &str| OWN_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
    let old = present
        .keys()
        .filter(|key| own(key) && !wanted.contains_key(*key));
    let new = wanted
        .iter()
        .filter(|(key, value)| present.get(*key) != Some(value));
    let mut changes: Map<String, Value> = old.map(|key| (key.clone(), Value::Null)).collect();
    changes.extend(new.map(|(key, value)| (key.clone(), json!(value))));
    (!changes.is_empty()).then(|| json!({"metadata": {"labels": changes}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_labels_are_removed_and_others_kept() {
        let cpu = Cpu {
            vendor: Some("AMD"),
            features: ["sse4.1".to_owned()].into(),
        };
        let wanted = wanted(&cpu);
        let mut present: BTreeMap<String, String> = [
            ("kubernetes.io/hostname", "node1"),
            ("kubevirt.io/schedulable", "true"),
            ("cpu-model.node.kubevirt.io/Conroe", "true"),
            ("cpu-vendor.node.kubevirt.io/AMD", "true"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
        let patch_of = |present: &_| patch(present, &wanted);
        let labels = json!({
            "cpu-model.node.kubevirt.io/Conroe": null,
            "cpu-feature.node.kubevirt.io/sse4.1": "true",
            "machine-type.node.kubevirt.io/q35": "true",
        });
        assert_eq!(patch_of(&present), Some(json!({"metadata": {"labels": labels}})));
        present.remove("cpu-model.node.kubevirt.io/Conroe");
        present.extend(wanted.clone());
        assert_eq!(patch_of(&present), None);
    }
}
