//! Sizes and allocation of the claims behind a VMI's volumes, as virt-controller writes them into the VMI's status.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::quantity::Quantity;

const MIB: u64 = 1 << 20;
/// One, in millionths.
const WHOLE: u32 = 1_000_000;

/// Size of a claim with a filesystem: `status.volumeStatus[].persistentVolumeClaimInfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimSize {
    /// The smaller of the claim's capacity and its request, in bytes.
    bytes: u64,
    /// Share that the filesystem needs for itself, in millionths.
    overhead: u32,
}

impl ClaimSize {
    /// Size of an image that is created in the claim, in bytes: a multiple of 1 MiB, the file system's share included.
    pub fn new_image_bytes(self) -> u64 {
        self.bytes / MIB * MIB
    }

    /// Size for the claim's disk image in bytes, a multiple of 1 MiB. `usable` is the number of bytes that the image and
    /// the free space of its filesystem have together.
    pub fn image_bytes(self, usable: u64) -> u64 {
        let bytes = u128::from(self.bytes.min(usable));
        let bytes = bytes * u128::from(WHOLE - self.overhead) / u128::from(WHOLE);
        // At most `self.bytes`.
        let bytes = u64::try_from(bytes).unwrap_or(0);
        bytes / MIB * MIB
    }

    /// Reads an entry of `volumeStatus`; none if it has no claim with a filesystem, or lacks a field.
    fn of(entry: &Value) -> Option<ClaimSize> {
        let claim = entry.get("persistentVolumeClaimInfo")?;
        if claim.get("volumeMode").and_then(Value::as_str) == Some("Block") {
            return None;
        }
        let storage = |field: &str| {
            let text = claim.get(field)?.get("storage")?.as_str()?;
            text.parse::<Quantity>().ok()?.bytes()
        };
        let overhead: f64 = claim.get("filesystemOverhead")?.as_str()?.parse().ok()?;
        if !(0.0..=1.0).contains(&overhead) {
            return None;
        }
        Some(ClaimSize {
            bytes: storage("capacity")?.min(storage("requests")?),
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "between 0 and a million"
            )]
            overhead: (overhead * f64::from(WHOLE)).round() as u32,
        })
    }
}

/// The sizes by volume. Entries that are not as KubeVirt writes them are passed over.
pub(super) fn claims(status: Option<&Value>) -> BTreeMap<String, ClaimSize> {
    let sizes = entries(status).filter_map(|(name, entry)| Some((name.to_owned(), ClaimSize::of(entry)?)));
    sizes.collect()
}

/// The volumes whose claims are preallocated.
pub(super) fn preallocated(status: Option<&Value>) -> BTreeSet<String> {
    let found = entries(status).filter(|(_, entry)| {
        let claim = entry.get("persistentVolumeClaimInfo");
        claim.and_then(|claim| claim.get("preallocated")) == Some(&Value::Bool(true))
    });
    found.map(|(name, _)| name.to_owned()).collect()
}

fn entries(status: Option<&Value>) -> impl Iterator<Item = (&str, &Value)> {
    let entries = status
        .and_then(|status| status.get("volumeStatus"))
        .and_then(Value::as_array);
    let entries = entries.into_iter().flatten();
    entries.filter_map(|entry| Some((entry.get("name")?.as_str()?, entry)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(name: &str, mode: &str, capacity: &str, overhead: &str) -> Value {
        json!({"name": name, "persistentVolumeClaimInfo": {
            "volumeMode": mode,
            "capacity": {"storage": capacity},
            "requests": {"storage": "1Gi"},
            "filesystemOverhead": overhead,
        }})
    }

    fn read(entries: &[Value]) -> BTreeMap<String, ClaimSize> {
        claims(Some(&json!({"volumeStatus": entries})))
    }

    #[test]
    fn image_has_the_claims_size_without_the_overhead() {
        let found = read(&[entry("data", "Filesystem", "2Gi", "0.06")]);
        let size = found["data"];
        // 1 GiB is requested; 94 % of it are 962.56 MiB.
        assert_eq!(size.image_bytes(u64::MAX), 962 * MIB);
        assert_eq!(size.new_image_bytes(), 1024 * MIB);
        assert_eq!(size.image_bytes(100 * MIB), 94 * MIB);
        assert_eq!(size.image_bytes(0), 0);
        let whole = read(&[entry("data", "Filesystem", "500Mi", "0")])["data"];
        assert_eq!(whole.image_bytes(u64::MAX), 500 * MIB);
        let nothing = read(&[entry("data", "Filesystem", "500Mi", "1")])["data"];
        assert_eq!(nothing.image_bytes(u64::MAX), 0);
    }

    #[test]
    fn other_entries_are_passed_over() {
        let broken = [
            entry("block", "Block", "1Gi", "0"),
            entry("size", "Filesystem", "-1", "0"),
            entry("size", "Filesystem", "much", "0"),
            entry("share", "Filesystem", "1Gi", "1.1"),
            entry("share", "Filesystem", "1Gi", "NaN"),
            json!({"name": "other", "persistentVolumeClaimInfo": 7}),
            json!({"name": 7}),
            json!("text"),
        ];
        assert_eq!(read(&broken), BTreeMap::new());
        assert_eq!(claims(None), BTreeMap::new());
        assert_eq!(claims(Some(&json!({"volumeStatus": {}}))), BTreeMap::new());
    }

    #[test]
    fn preallocated_claims_of_either_mode_are_found() {
        let mut entries = [
            entry("file", "Filesystem", "1Gi", "0.06"),
            entry("block", "Block", "1Gi", "0"),
            entry("sparse", "Filesystem", "1Gi", "0.06"),
            entry("text", "Filesystem", "1Gi", "0.06"),
            json!({"name": "none"}),
        ];
        for (entry, value) in entries
            .iter_mut()
            .zip([json!(true), json!(true), json!(false), json!("true")])
        {
            entry["persistentVolumeClaimInfo"]["preallocated"] = value;
        }
        let found = preallocated(Some(&json!({"volumeStatus": entries})));
        assert_eq!(
            found.iter().map(String::as_str).collect::<Vec<_>>(),
            ["block", "file"]
        );
        assert_eq!(preallocated(None), BTreeSet::new());
    }
}
