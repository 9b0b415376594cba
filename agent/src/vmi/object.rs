//! A VirtualMachineInstance as untyped JSON, so that an update keeps every field that the agent does not know.

use kube::ResourceExt;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::Value;

/// Grace period of a VMI that sets none, in seconds.
const DEFAULT_GRACE: u64 = 30;

/// Reason of a condition that Husk's agent alone writes, from the first status on.
pub const HUSK_REASON: &str = "HuskNotLiveMigratable";

/// The resource of VMIs in the API.
pub fn resource() -> ApiResource {
    let kind = GroupVersionKind::gvk("kubevirt.io", "v1", "VirtualMachineInstance");
    ApiResource::from_gvk_with_plural(&kind, "virtualmachineinstances")
}

/// Clears `metadata.managedFields`, which is half of an object's size. A PUT without it does not change it on the API
/// server.
pub fn forget_managers(object: &mut DynamicObject) {
    object.metadata.managed_fields = None;
}

/// A VMI, as the API server sent it, without the managers of its fields.
#[derive(Debug, Clone, PartialEq)]
pub struct Vmi(pub DynamicObject);

impl Vmi {
    /// Its namespace.
    pub fn namespace(&self) -> String {
        self.0.namespace().unwrap_or_default()
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.0.name_any()
    }

    /// Its UID.
    pub fn uid(&self) -> &str {
        self.0.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Version of the object; Kubernetes compares them as numbers. 0 if it is none.
    pub fn version(&self) -> u64 {
        let version = self.0.metadata.resource_version.as_deref();
        version.and_then(|version| version.parse().ok()).unwrap_or(0)
    }

    /// `spec`.
    pub fn spec(&self) -> &Value {
        &self.0.data["spec"]
    }

    /// `status`.
    pub fn status(&self) -> &Value {
        &self.0.data["status"]
    }

    /// `status.phase`; empty before there is one.
    pub fn phase(&self) -> &str {
        self.status()["phase"].as_str().unwrap_or_default()
    }

    /// Its phase never changes again.
    pub fn is_final(&self) -> bool {
        matches!(self.phase(), "Succeeded" | "Failed")
    }

    /// An agent of Husk has written its status: its VM was in a pod of Husk's.
    pub fn ran_under_husk(&self) -> bool {
        let conditions = self.status()["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        conditions.any(|condition| condition["reason"] == HUSK_REASON)
    }

    /// It is being deleted.
    pub fn is_deleting(&self) -> bool {
        self.0.metadata.deletion_timestamp.is_some()
    }

    /// `spec.terminationGracePeriodSeconds`, which may be shortened while the VM shuts down.
    pub fn grace_seconds(&self) -> u64 {
        let grace = self.spec()["terminationGracePeriodSeconds"].as_u64();
        grace.unwrap_or(DEFAULT_GRACE)
    }

    /// UIDs of its pods on `node`, including ended ones.
    pub fn pods_on(&self, node: &str) -> Vec<&str> {
        let pods = self.status()["activePods"].as_object();
        let here = pods
            .into_iter()
            .flatten()
            .filter(|(_, on)| on.as_str() == Some(node));
        here.map(|(uid, _)| uid.as_str()).collect()
    }

    /// Names of volumes that are not part of the launcher pod: they are attached by pods of their own.
    pub fn hotpluggable(&self) -> Vec<&str> {
        let volumes = self.spec()["volumes"].as_array();
        let plugged = volumes.into_iter().flatten().filter(|volume| {
            ["persistentVolumeClaim", "dataVolume"]
                .iter()
                .any(|source| volume[*source]["hotpluggable"] == true)
        });
        plugged.filter_map(|volume| volume["name"].as_str()).collect()
    }

    /// Names of the volumes that the status lists as hotplugged.
    pub fn plugged(&self) -> Vec<String> {
        let entries = self.status()["volumeStatus"].as_array();
        let plugged = entries
            .into_iter()
            .flatten()
            .filter(|entry| entry["hotplugVolume"].is_object());
        plugged
            .filter_map(|entry| entry["name"].as_str().map(str::to_owned))
            .collect()
    }

    /// What SyncVmi brings to the VM: the spec, and the sizes of the claims, which virt-controller copies to the status.
    pub fn desired(&self) -> Value {
        let entries = self.status()["volumeStatus"].as_array();
        let claims: serde_json::Map<String, Value> = entries
            .into_iter()
            .flatten()
            .filter_map(|entry| {
                let claim = &entry["persistentVolumeClaimInfo"];
                let name = entry["name"].as_str()?;
                claim.is_object().then(|| {
                    let size = [
                        &claim["capacity"],
                        &claim["requests"],
                        &claim["filesystemOverhead"],
                    ];
                    (name.to_owned(), serde_json::json!(size))
                })
            })
            .collect();
        serde_json::json!({"spec": self.spec(), "claims": claims})
    }

    /// The object for the pod's shim, as JSON, without the claims of memory dumps: no VM has them as disks, and virt-api
    /// adds them to a VMI whose VM runs.
    pub fn manifest(&self) -> String {
        let mut object = self.0.clone();
        if let Some(volumes) = object.data["spec"]["volumes"].as_array_mut() {
            volumes.retain(|volume| volume["memoryDump"].is_null());
        }
        serde_json::to_string(&object).unwrap_or_default()
    }

    /// The same object with another status.
    pub fn with_status(&self, status: Value) -> DynamicObject {
        let mut object = self.0.clone();
        object.data["status"] = status;
        object
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::vmi::testing::scheduled;

    #[test]
    fn claims_of_memory_dumps_are_no_volumes_of_the_vm() {
        let mut vmi = scheduled("vm");
        let volumes = vmi["spec"]["volumes"].as_array_mut().unwrap();
        let before = volumes.clone();
        volumes.push(json!({"name": "dump", "memoryDump": {"claimName": "dump", "hotpluggable": true}}));
        let vmi = Vmi(serde_json::from_value(vmi).unwrap());
        let manifest: Value = serde_json::from_str(&vmi.manifest()).unwrap();
        assert_eq!(manifest["spec"]["volumes"], json!(before));
    }
}
