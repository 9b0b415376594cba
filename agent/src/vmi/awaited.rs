//! Hotpluggable volumes whose attachment pod runs and whose data is missing.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// Time after which the absence of a volume's data is reported.
const REPORT_AFTER: Duration = match cfg!(test) {
    true => Duration::from_secs(1),
    false => Duration::from_secs(30),
};

/// Names of a volume and of its attachment pod.
pub type VolumeOfPod = (String, String);

/// A volume without its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AwaitedVolume {
    /// Name of the volume.
    pub name: String,
    /// Name of its attachment pod.
    pub pod: String,
    /// The thing that is not there.
    pub missing: String,
}

/// The volumes of a VMI whose data is awaited.
#[derive(Debug, Default)]
pub struct AwaitedVolumes(BTreeMap<VolumeOfPod, Wait>);

#[derive(Debug)]
struct Wait {
    since: Instant,
    reported: bool,
}

impl AwaitedVolumes {
    /// Updates the table: `missing` are volumes whose data is missing; `unseen` were not checked this time, and keep
    /// their waiting time. Returns the messages that are due, each once for a volume and attachment pod.
    pub fn update(&mut self, missing: &[AwaitedVolume], unseen: &[VolumeOfPod], now: Instant) -> Vec<String> {
        let key = |volume: &AwaitedVolume| (volume.name.clone(), volume.pod.clone());
        self.0.retain(|waiting, _| {
            unseen.contains(waiting) || missing.iter().any(|volume| key(volume) == *waiting)
        });
        let due = missing.iter().filter(|volume| {
            let wait = self.0.entry(key(volume)).or_insert(Wait {
                since: now,
                reported: false,
            });
            let due = now.duration_since(wait.since) >= REPORT_AFTER;
            due && !std::mem::replace(&mut wait.reported, due)
        });
        due.map(AwaitedVolume::message).collect()
    }
}

impl AwaitedVolume {
    fn message(&self) -> String {
        format!(
            "volume {:?}: attachment pod {} has not brought its data for {} s: {}",
            self.name,
            self.pod,
            REPORT_AFTER.as_secs(),
            self.missing
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(name: &str, pod: &str) -> AwaitedVolume {
        AwaitedVolume {
            name: name.to_owned(),
            pod: pod.to_owned(),
            missing: "hotplug-disks/data has no block device".to_owned(),
        }
    }

    #[test]
    fn each_volume_is_reported_once_after_a_while() {
        let mut awaited = AwaitedVolumes::default();
        let start = Instant::now();
        let (data, other) = (volume("data", "hp-1"), volume("other", "hp-1"));
        let both = [data.clone(), other.clone()];
        let update = |awaited: &mut AwaitedVolumes, missing: &[_], now| awaited.update(missing, &[], now);
        assert!(update(&mut awaited, std::slice::from_ref(&data), start).is_empty());
        let later = start + REPORT_AFTER;
        let reported = update(&mut awaited, &both, later);
        assert_eq!(reported.len(), 1);
        for part in ["\"data\"", "hp-1", "no block device"] {
            assert!(reported[0].contains(part), "{reported:?}");
        }
        let last = later + REPORT_AFTER;
        assert_eq!(update(&mut awaited, &both, last).len(), 1);
        assert!(update(&mut awaited, &both, last + REPORT_AFTER).is_empty());
        // The delay starts again when the data has come, and with another attachment pod.
        assert!(update(&mut awaited, &[], last).is_empty());
        let again = [data, volume("other", "hp-2")];
        assert!(update(&mut awaited, &again, last).is_empty());
        assert_eq!(update(&mut awaited, &again, last + REPORT_AFTER).len(), 2);
    }

    #[test]
    fn volumes_that_nobody_looked_for_wait_on() {
        let mut awaited = AwaitedVolumes::default();
        let start = Instant::now();
        let data = [volume("data", "hp-1")];
        let unseen = [("data".to_owned(), "hp-1".to_owned())];
        assert!(awaited.update(&data, &[], start).is_empty());
        assert!(awaited.update(&[], &unseen, start).is_empty());
        let later = start + REPORT_AFTER;
        assert_eq!(awaited.update(&data, &[], later).len(), 1);
        // Nor is it reported again.
        assert!(awaited.update(&[], &unseen, later).is_empty());
        assert!(awaited.update(&data, &[], later + REPORT_AFTER).is_empty());
    }
}
