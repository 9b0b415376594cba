//! Checks of a description that was read: a plan in it did not come from a manifest that was validated.

use std::collections::HashSet;
use std::path::Path;

use husk_vmi::{DeviceType, DiskPlan, DiskSource, VmPlan};
use husk_volumes::ImageFormat;
use serde_json::Value;

use super::format::{
    BaseContent, CHECKSUMS, DiskContent, MEMORY, SNAPSHOT, STATE, SavedDisk, Snapshot, SnapshotImage,
};
use super::interfaces;

/// As KubeVirt: the index of an interface is part of an address.
pub(super) const MOST_NICS: usize = 100;
const MOST_VCPUS: u32 = 254;
const MOST_DISKS: usize = 20_000;
const PAGE: u64 = 4096;
/// Maximum length of a file name, in bytes.
const FILE_NAME: usize = 255;

/// Refuses a plan with fields that this version does not know: it would be another machine without them.
pub(super) fn known_fields(document: &Value, snapshot: &Snapshot) -> Result<(), String> {
    let known = serde_json::to_value(&snapshot.plan).map_err(|error| error.to_string())?;
    match document.get("plan").and_then(|plan| unknown(plan, &known)) {
        Some(field) => Err(format!(
            "plan{field}: this version of Husk does not know the field: use the version that made the snapshot"
        )),
        None => Ok(()),
    }
}

/// Path of a field of `value` that `known` lacks.
fn unknown(value: &Value, known: &Value) -> Option<String> {
    match (value, known) {
        (Value::Object(fields), Value::Object(known)) => fields.iter().find_map(|(name, value)| {
            let deeper = match known.get(name) {
                Some(known) => unknown(value, known)?,
                // Null is how some programs write a field that is left out.
                None if value.is_null() => return None,
                None => String::new(),
            };
            Some(format!(".{}{deeper}", name.escape_default()))
        }),
        (Value::Array(items), Value::Array(known)) => {
            let mut pairs = items.iter().zip(known).enumerate();
            pairs.find_map(|(n, (item, known))| Some(format!("[{n}]{}", unknown(item, known)?)))
        }
        _ => None,
    }
}

/// Checks what the monitor relies on. The VMM checks its own part.
pub(super) fn check(snapshot: &Snapshot) -> Result<(), String> {
    check_plan(&snapshot.plan)?;
    interfaces::check(&snapshot.interfaces, &snapshot.plan)?;
    if snapshot.disks.len() != snapshot.plan.disks.len() {
        return Err(format!(
            "disks: {} entries, but the plan has {} disks",
            snapshot.disks.len(),
            snapshot.plan.disks.len()
        ));
    }
    let mut files = HashSet::from([SNAPSHOT, STATE, MEMORY, CHECKSUMS]);
    let disks = snapshot.disks.iter().zip(&snapshot.plan.disks).enumerate();
    for (n, (saved, disk)) in disks {
        let field = |reason: String| format!("disks[{n}]: {reason}");
        if saved.name != disk.name {
            let reason = format!("{:?} is not the plan's disk {:?}", saved.name, disk.name);
            return Err(field(reason));
        }
        check_content(saved, disk).map_err(|reason| field(reason.into()))?;
        for image in images(&saved.content) {
            if !is_file_name(&image.file) || !files.insert(&image.file) {
                return Err(field(format!("{:?} is not a file name of its own", image.file)));
            }
        }
    }
    match &snapshot.checksums {
        Some(checksums) => checksums
            .check(snapshot)
            .map_err(|reason| format!("checksums.{reason}")),
        None => Ok(()),
    }
}

/// The images of a disk that are in the snapshot.
pub(super) fn images(content: &DiskContent) -> Vec<&SnapshotImage> {
    match content {
        DiskContent::Held { image, base, .. } => match base {
            Some(BaseContent::Held(base)) => vec![image, base],
            _ => vec![image],
        },
        _ => Vec::new(),
    }
}

fn check_plan(plan: &VmPlan) -> Result<(), String> {
    let field = |field: &str, reason: &str| Err(format!("plan.{field}: {reason}"));
    if !is_name(&plan.name) || !is_name(&plan.namespace) {
        return field("name", "it is not a name with a namespace");
    }
    let topology = plan.topology;
    let counts = [topology.sockets, topology.cores, topology.threads];
    if counts.contains(&0) || topology.vcpus() > MOST_VCPUS {
        return field("topology", "a VM has 1 to 254 vCPUs");
    }
    if plan.memory.guest_bytes == 0 || !plan.memory.guest_bytes.is_multiple_of(PAGE) {
        return field("memory", "it is not a number of pages");
    }
    if plan.nics.len() > MOST_NICS || plan.disks.len() > MOST_DISKS {
        return field("nics", "the VM has too many devices");
    }
    let mut names = HashSet::new();
    for (n, nic) in plan.nics.iter().enumerate() {
        if !is_name(&nic.name) || !names.insert(&nic.name) {
            return field(&format!("nics[{n}].name"), "it is not a name of its own");
        }
    }
    let mut names = HashSet::new();
    for (n, disk) in plan.disks.iter().enumerate() {
        if !is_name(&disk.name) || !names.insert(&disk.name) {
            return field(&format!("disks[{n}].name"), "it is not a name of its own");
        }
        let absolute = |path: &Path| path.is_absolute();
        let is_usable = match &disk.source {
            DiskSource::File(path) | DiskSource::HostDisk { path, .. } => absolute(path),
            DiskSource::ContainerDisk { path, .. } => absolute(path),
            _ => true,
        };
        if !is_usable {
            return field(&format!("disks[{n}].source"), "its path is not absolute");
        }
    }
    Ok(())
}

/// Checks that a disk with this source can have this content.
fn check_content(saved: &SavedDisk, disk: &DiskPlan) -> Result<(), &'static str> {
    if matches!(disk.device, DeviceType::Lun { .. }) {
        return Err("a SCSI device of the host is in no snapshot");
    }
    let fits = match (&disk.source, &saved.content) {
        (DiskSource::Empty | DiskSource::DownwardMetrics, DiskContent::Remade) => true,
        (
            DiskSource::EmptyDisk { .. } | DiskSource::CloudInit { .. } | DiskSource::Files { .. },
            DiskContent::Held { image, base, .. },
        ) => base.is_none() && image.format == ImageFormat::Raw,
        (DiskSource::File(_) | DiskSource::HostDisk { .. }, DiskContent::Held { image, base, .. }) => {
            let format = if base.is_some() {
                ImageFormat::Qcow2
            } else {
                ImageFormat::Raw
            };
            base.is_some() == disk.overlay && image.format == format
        }
        (DiskSource::ContainerDisk { .. }, DiskContent::Held { image, base, .. }) => {
            base.is_none() || image.format == ImageFormat::Qcow2
        }
        (DiskSource::File(_) | DiskSource::HostDisk { .. }, DiskContent::Outside(_)) => !disk.overlay,
        (DiskSource::ContainerDisk { .. }, DiskContent::Outside(_)) => disk.read_only,
        _ => false,
    };
    match fits {
        true => Ok(()),
        false => Err("the plan's disk has another kind of content"),
    }
}

/// True for a name that is one part of a path, and prints as it is.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=253).contains(&name.len()) && name.bytes().all(plain) && !name.starts_with('.')
}

fn is_file_name(name: &str) -> bool {
    is_name(name) && name.len() <= FILE_NAME
}
