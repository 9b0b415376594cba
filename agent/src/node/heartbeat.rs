//! The heartbeat: an annotation with the time, and whether VMIs may be scheduled.

use jiff::Timestamp;
use serde_json::{Value, json};

/// A strategic merge patch of the Node. virt-controller parses the time as RFC 3339 in UTC.
pub(super) fn patch(schedulable: bool, now: Timestamp) -> Value {
    let now = now.round(jiff::Unit::Second).unwrap_or(now);
    json!({
        "metadata": {
            "labels": {
                "kubevirt.io/schedulable": schedulable.to_string(),
                // The shim does not pin vCPUs.
                "cpumanager": "false",
                "kubevirt.io/cpumanager": "false",
            },
            "annotations": {"kubevirt.io/heartbeat": now.to_string()},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_has_whole_seconds_in_utc() {
        let patch = patch(true, "2026-11-23T06:00:00.4Z".parse().unwrap());
        let metadata = &patch["metadata"];
        assert_eq!(
            metadata["annotations"]["kubevirt.io/heartbeat"],
            "2026-11-23T06:00:00Z"
        );
        assert_eq!(metadata["labels"]["kubevirt.io/schedulable"], "true");
    }
}
