//! `status.volumeStatus`: virt-controller makes the entries, the agent writes targets, and the phases Ready,
//! UnMountedFromPod and MemoryDumpFailed of hotpluggable volumes.

use husk_proto::shim::v1::Disk;
use serde_json::{Value, json};

use super::Observed;
use crate::vmi::object::Vmi;

/// Sources whose data Husk makes an ISO image of. Their entries have its size.
const GENERATED: [&str; 8] = [
    "cloudInitNoCloud",
    "cloudInitConfigDrive",
    "configMap",
    "secret",
    "downwardAPI",
    "serviceAccount",
    "sysprep",
    "downwardMetrics",
];

/// Writes targets, sizes and phases into the entries that are there.
pub fn update(status: &mut Value, vmi: &Vmi, disks: &[Disk], observed: &Observed<'_>) {
    let hotpluggable = vmi.hotpluggable();
    let Some(entries) = status.get_mut("volumeStatus").and_then(Value::as_array_mut) else {
        return;
    };
    // Who creates a VMI may give it any entry.
    for entry in entries.iter_mut().filter(|entry| entry.is_object()) {
        let name = entry["name"].as_str().unwrap_or_default().to_owned();
        // The target of an entry says that its volume is attached.
        let disk = disks
            .iter()
            .find(|disk| disk.name == name && !disk.is_empty_drive());
        let target = disk.map_or("", |disk| disk.target.as_str());
        entry["target"] = json!(target);
        if let Some(bytes) = disk.and_then(|disk| disk.bytes)
            && is_generated(vmi.spec(), &name)
        {
            entry["size"] = json!(bytes);
        }
        if entry["memoryDumpVolume"].is_object() {
            refuse_memory_dump(entry, &name);
        } else if entry["hotplugVolume"].is_object() {
            let volumes = observed.synced.into_iter().flat_map(|answer| &answer.volumes);
            let mut reported = volumes.filter(|volume| volume.name == name);
            let reported = reported.next().map_or("", |volume| volume.phase.as_str());
            let released = !observed.syncing && matches!(reported, "" | "UnMountedFromPod");
            let wanted = hotpluggable.contains(&name.as_str());
            set_phase(entry, &name, wanted, !target.is_empty(), released);
        }
    }
}

/// Sets the phase to Ready or UnMountedFromPod if the VM's state calls for it.
fn set_phase(entry: &mut Value, name: &str, wanted: bool, attached: bool, released: bool) {
    let present = entry["phase"].as_str().unwrap_or_default();
    // The agent never writes MountedToPod. It mounts nothing, and virt-controller leaves a volume in that phase out of the
    // next attachment pod.
    let next = match present {
        "Ready" if attached => return,
        // Also Detaching: the attachment pod must stay while the VM has the volume.
        _ if attached => "Ready",
        "Ready" | "MountedToPod" | "AttachedToNode" if !wanted && released => "UnMountedFromPod",
        _ => return,
    };
    let (reason, message) = match next {
        "Ready" => (
            "VolumeReady",
            format!("Successfully attach hotplugged volume {name} to VM"),
        ),
        _ => (
            "VolumeUnMountedFromPod",
            format!("Volume {name} has been unmounted from virt-launcher pod"),
        ),
    };
    entry["phase"] = json!(next);
    entry["reason"] = json!(reason);
    entry["message"] = json!(message);
}

/// Fails the memory dump for which virt-controller has attached a claim. virt-controller then removes the volume.
fn refuse_memory_dump(entry: &mut Value, name: &str) {
    if matches!(entry["phase"].as_str(), Some("AttachedToNode" | "MountedToPod")) {
        entry["phase"] = json!("MemoryDumpFailed");
        entry["reason"] = json!("MemoryDumpNotSupported");
        entry["message"] = json!(format!(
            "Memory dump to pvc {name} failed: Husk does not dump memory"
        ));
    }
}

/// Reasons and messages of the events for volumes whose phase has changed from `old` to `new`.
pub fn events(old: &Value, new: &Value) -> Vec<(String, String)> {
    let entries = |status: &Value| status["volumeStatus"].as_array().cloned().unwrap_or_default();
    let text = |entry: &Value, field: &str| entry[field].as_str().unwrap_or_default().to_owned();
    let old = entries(old);
    let changed = entries(new).into_iter().filter(|entry| {
        let before = old.iter().find(|before| before["name"] == entry["name"]);
        before.is_some_and(|before| before["phase"] != entry["phase"])
    });
    changed
        .map(|entry| (text(&entry, "reason"), text(&entry, "message")))
        .collect()
}

fn is_generated(spec: &Value, name: &str) -> bool {
    let volumes = spec["volumes"].as_array();
    let volume = volumes
        .into_iter()
        .flatten()
        .find(|volume| volume["name"] == name);
    volume.is_some_and(|volume| GENERATED.iter().any(|source| volume[*source].is_object()))
}

/// `status.migrationMethod`: `BlockMigration` if a volume is not shared between nodes, else `LiveMigration`.
pub fn migration_method(status: &Value) -> &'static str {
    let entries = status["volumeStatus"].as_array();
    let shared = |entry: &Value| {
        let modes = entry["persistentVolumeClaimInfo"]["accessModes"].as_array();
        modes.into_iter().flatten().any(|mode| mode == "ReadWriteMany")
    };
    match entries.into_iter().flatten().all(shared) {
        true => "LiveMigration",
        false => "BlockMigration",
    }
}
