//! The VirtualMachineInstance that a manifest describes.

use std::collections::{BTreeMap, BTreeSet};

use super::claim::ClaimSize;
use crate::field::{FieldError, Warning};
use crate::types::Spec;

/// A VirtualMachineInstance, or the one that a VirtualMachine describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmi {
    /// Name, a DNS-1123 subdomain.
    pub name: String,
    /// Namespace, a DNS-1123 label.
    pub namespace: String,
    /// UID, if a cluster assigned one.
    pub uid: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// Specification.
    pub spec: Spec,
    /// Sizes of the claims with a filesystem, by volume, if a cluster wrote them into the status.
    pub claims: BTreeMap<String, ClaimSize>,
    /// Volumes whose claims are preallocated, if a cluster wrote that into the status.
    pub preallocated: BTreeSet<String>,
    /// CID on the host's AF_VSOCK (`status.VSOCKCID`), as given, if a cluster assigned one.
    pub vsock_cid: Option<serde_json::Value>,
    /// Name of its document in messages; none if the manifest has one document only.
    pub document: Option<String>,
    /// Path of `spec` in the document: `spec` or `spec.template.spec`.
    pub(crate) path: &'static str,
    /// Valid but unsupported fields found by the schema check.
    pub(crate) unsupported: Vec<FieldError>,
    /// Warnings about ignored fields found by the schema check.
    pub(crate) warnings: Vec<Warning>,
}

impl Vmi {
    /// Path in the document of a field below `spec`.
    #[must_use]
    pub fn at(&self, field: &str) -> String {
        format!("{}.{field}", self.path)
    }

    /// Path in the document of a field below `metadata`.
    pub(crate) fn metadata_at(&self, field: &str) -> String {
        format!(
            "{}metadata.{field}",
            self.path.strip_suffix("spec").unwrap_or_default()
        )
    }

    /// True if it is on the pod network: explicitly, or because it lists no networks.
    pub(crate) fn has_pod_network(&self) -> bool {
        let devices = &self.spec.domain.devices;
        if self.spec.networks.is_empty() {
            return devices.interfaces.is_empty() && devices.autoattach_pod_interface.unwrap_or(true);
        }
        self.spec.networks.iter().any(|network| network.pod.is_some())
    }
}
