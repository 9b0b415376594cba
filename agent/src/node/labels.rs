//! Labels of the node for the scheduler. virt-controller selects nodes by them.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::cpu::Cpu;

/// The annotation that keeps labels from being changed.
pub(super) const SKIP_NODE: &str = "node-labeller.kubevirt.io/skip-node";
/// Machine types of VMIs: virt-api's default. A VMI's status has no other, since each there must be a label.
const MACHINE_TYPES: [&str; 1] = ["q35"];
/// Prefixes of labels that only a node's agent sets.
const OWN_PREFIXES: [&str; 10] = [
    "cpu-feature.node.kubevirt.io/",
    "cpu-model-migration.node.kubevirt.io/",
    "cpu-model.node.kubevirt.io/",
    "cpu-timer.node.kubevirt.io/",
    "cpu-vendor.node.kubevirt.io/",
    "host-model-cpu.node.kubevirt.io/",
    "host-model-required-features.node.kubevirt.io/",
    "hyperv.node.kubevirt.io/",
    "kubevirt.io/vm-arch-",
    "machine-type.node.kubevirt.io/",
];
/// Other labels that virt-handler sets. It leaves them on a node that becomes Husk's.
const OWN_LABELS: [&str; 6] = [
    "kubevirt.io/realtime",
    "kubevirt.io/sev",
    "kubevirt.io/sev-es",
    "kubevirt.io/sev-snp",
    "kubevirt.io/tdx",
    "node-labeller.kubevirt.io/obsolete-host-model",
];
/// KubeVirt selects nodes by it under a feature gate, and it is true of every node of Husk's.
const ARCHITECTURE: &str = "kubevirt.io/vm-arch-amd64";

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
    let own = |key: &str| {
        let prefixed = OWN_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
        OWN_LABELS.contains(&key) || prefixed && key != ARCHITECTURE
    };
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
            ("kubevirt.io/severity", "low"),
            ("kubevirt.io/vm-arch-amd64", "true"),
            ("cpu-vendor.node.kubevirt.io/AMD", "true"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
        let patch_of = |present: &_| patch(present, &wanted);
        let stale = [
            "cpu-model.node.kubevirt.io/Conroe",
            "kubevirt.io/realtime",
            "kubevirt.io/sev",
            "kubevirt.io/sev-es",
            "kubevirt.io/sev-snp",
            "kubevirt.io/tdx",
            "kubevirt.io/vm-arch-arm64",
            "node-labeller.kubevirt.io/obsolete-host-model",
        ];
        present.extend(stale.map(|key| (key.to_owned(), "true".to_owned())));
        let mut labels = json!({
            "cpu-feature.node.kubevirt.io/sse4.1": "true",
            "machine-type.node.kubevirt.io/q35": "true",
        });
        for key in stale {
            labels[key] = Value::Null;
        }
        assert_eq!(patch_of(&present), Some(json!({"metadata": {"labels": labels}})));
        present.retain(|key, _| !stale.contains(&key.as_str()));
        present.extend(wanted.clone());
        assert_eq!(patch_of(&present), None);
    }
}
