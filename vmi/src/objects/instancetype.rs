//! Instance types and preferences.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::ObjectKind;
use crate::field::FieldError;
use crate::instancetype::spread;
use crate::load::Metadata;
use crate::schema::Diagnostics;
use crate::types::{InstancetypeSpec, PreferenceSpec};

/// A VirtualMachineInstancetype, or a VirtualMachineClusterInstancetype: its namespace is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instancetype {
    /// Name, namespace and labels.
    pub metadata: Metadata,
    /// `spec`
    pub spec: InstancetypeSpec,
}

/// A VirtualMachinePreference, or a VirtualMachineClusterPreference: its namespace is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preference {
    /// Name, namespace and labels.
    pub metadata: Metadata,
    /// `spec`
    pub spec: PreferenceSpec,
}

/// Values of `spec.cpu.preferredCPUTopology`.
const TOPOLOGIES: &[&str] = &[
    "sockets",
    "cores",
    "threads",
    "spread",
    "any",
    "preferSockets",
    "preferCores",
    "preferThreads",
    "preferSpread",
    "preferAny",
];

pub(super) fn read_instancetype(
    object: &Map<String, Value>,
    metadata: Metadata,
    found: &mut Diagnostics,
) -> ObjectKind {
    let spec: InstancetypeSpec = spec(object, found);
    if spec.memory.overcommit_percent != 0 && spec.memory.hugepages.is_some() {
        let field = "spec.memory.overcommitPercent";
        let text = format!("{field} and spec.memory.hugepages should not be requested together.");
        found.schema.push(FieldError::invalid(field, text));
    }
    ObjectKind::Instancetype(Box::new(Instancetype { metadata, spec }))
}

pub(super) fn read_preference(
    object: &Map<String, Value>,
    metadata: Metadata,
    found: &mut Diagnostics,
) -> ObjectKind {
    let spec: PreferenceSpec = spec(object, found);
    let mut refuse = |field: &str, text: String| found.schema.push(FieldError::invalid(field, text));
    let topology = spec.cpu.preferred_cpu_topology.as_deref();
    if let Some(topology) = topology.filter(|topology| !TOPOLOGIES.contains(topology)) {
        let text = format!("unknown preferredCPUTopology {topology}");
        refuse("spec.cpu.preferredCPUTopology", text);
    }
    if spread::is_preferred(&spec) {
        let (ratio, across) = spread::options(&spec);
        if !spread::ACROSS.contains(&across) {
            let text = format!("across {across} is not supported");
            refuse("spec.cpu.spreadOptions.across", text);
        } else if across == "CoresThreads" && ratio != 2 {
            let text =
                "only a ratio of 2 (1 core 2 threads) is allowed when spreading vCPUs over cores and threads";
            refuse("spec.cpu.spreadOptions.ratio", text.to_owned());
        } else if ratio == 0 {
            refuse(
                "spec.cpu.spreadOptions.ratio",
                "must be greater than zero".to_owned(),
            );
        }
    }
    ObjectKind::Preference(Box::new(Preference { metadata, spec }))
}

/// Reads a spec that matches the schema. Its fields' support is that of the VMI's fields that they are written to.
fn spec<T: DeserializeOwned + Default>(object: &Map<String, Value>, found: &mut Diagnostics) -> T {
    found.unsupported.clear();
    found.warnings.clear();
    let spec = object.get("spec").cloned().unwrap_or_default();
    serde_json::from_value(spec).unwrap_or_else(|error| {
        found.schema.push(FieldError::invalid("spec", error.to_string()));
        T::default()
    })
}
