//! The VirtualMachineInstance that a manifest describes.

use std::collections::BTreeMap;

use crate::field::{FieldError, Note};
use crate::types::Spec;

/// A VirtualMachineInstance, or the one a VirtualMachine would make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmi {
    /// Its name, a DNS-1123 subdomain.
    pub name: String,
    /// Its namespace, a DNS-1123 label.
    pub namespace: String,
    /// Its UID, if a cluster gave it one.
    pub uid: Option<String>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// What it asks for.
    pub spec: Spec,
    /// What tells its document apart from the manifest's others, for people; none for the only one.
    pub document: Option<String>,
    /// Where `spec` stands in the document: `spec` or `spec.template.spec`.
    pub(crate) path: &'static str,
    /// Valid fields that are refused, found while reading.
    pub(crate) unsupported: Vec<FieldError>,
    /// Valid fields that are left out, found while reading.
    pub(crate) notes: Vec<Note>,
}

impl Vmi {
    /// The path of a field below `spec`, as the document has it.
    pub(crate) fn at(&self, field: &str) -> String {
        format!("{}.{field}", self.path)
    }

    /// The path of a field of its metadata, as the document has it.
    pub(crate) fn metadata_at(&self, field: &str) -> String {
        format!(
            "{}metadata.{field}",
            self.path.strip_suffix("spec").unwrap_or_default()
        )
    }

    /// Whether it is on the pod network: by name, or because it names no network at all.
    pub(crate) fn has_pod_network(&self) -> bool {
        let devices = &self.spec.domain.devices;
        if self.spec.networks.is_empty() {
            return devices.interfaces.is_empty() && devices.autoattach_pod_interface.unwrap_or(true);
        }
        self.spec.networks.iter().any(|network| network.pod.is_some())
    }
}
