//! The limits of a container as properties of a systemd unit. systemd rewrites the cgroup files from these, for example
//! on `daemon-reload`.

use oci_spec::runtime::LinuxResources;
use zbus::zvariant::Value;

use super::limits::{PERIOD, cpu_weight, pids, swap_limit};

pub(super) type Property = (&'static str, Value<'static>);

const INFINITY: u64 = u64::MAX;
const SECOND: u64 = 1_000_000;
/// systemd stores CPU quotas in percent, and runc rounds up to the next percent.
const PERCENT: u64 = SECOND / 100;

/// Properties for all limits that systemd knows. Other limits are only written to files, which systemd leaves alone.
pub(super) fn from_resources(resources: &LinuxResources) -> Vec<Property> {
    let mut properties: Vec<Property> = Vec::new();
    let mut set = |name, value: Value<'static>| properties.push((name, value));
    if let Some(memory) = resources.memory() {
        if let Some(limit) = memory.limit().filter(|limit| *limit != 0) {
            set("MemoryMax", limit_value(limit).into());
        }
        if let Some(swap) = swap_limit(memory) {
            set("MemorySwapMax", limit_value(swap).into());
        }
        if let Some(low) = memory.reservation().filter(|low| *low > 0) {
            set("MemoryLow", limit_value(low).into());
        }
    }
    if let Some(cpu) = resources.cpu() {
        if let Some(shares) = cpu.shares().filter(|shares| *shares != 0) {
            set("CPUWeight", cpu_weight(shares).into());
        }
        if let Some(quota) = cpu.quota().filter(|quota| *quota != 0) {
            let period = cpu.period().filter(|period| *period != 0).unwrap_or(PERIOD);
            set("CPUQuotaPeriodUSec", period.into());
            set("CPUQuotaPerSecUSec", quota_per_second(quota, period).into());
        }
        for (name, list) in [("AllowedCPUs", cpu.cpus()), ("AllowedMemoryNodes", cpu.mems())] {
            // An invalid list is skipped here: the kernel refuses it when the file is written.
            if let Some(mask) = list.as_deref().and_then(list_mask) {
                set(name, mask.into());
            }
        }
    }
    if let Some(pids) = resources.pids().as_ref().and_then(pids) {
        set("TasksMax", limit_value(pids).into());
    }
    for (file, value) in resources.unified().iter().flatten() {
        let value = match value.trim() {
            "max" => Some(INFINITY),
            value => value.parse().ok(),
        };
        if let (Some(name), Some(value)) = (property_name(file), value) {
            set(name, value.into());
        }
    }
    properties
}

/// Property of a cgroup file that holds one number.
fn property_name(file: &str) -> Option<&'static str> {
    Some(match file {
        "memory.max" => "MemoryMax",
        "memory.high" => "MemoryHigh",
        "memory.low" => "MemoryLow",
        "memory.min" => "MemoryMin",
        "memory.swap.max" => "MemorySwapMax",
        "cpu.weight" => "CPUWeight",
        "pids.max" => "TasksMax",
        _ => return None,
    })
}

/// Converts a limit: negative means unlimited.
fn limit_value(limit: i64) -> u64 {
    u64::try_from(limit).unwrap_or(INFINITY)
}

/// CPU time per second, in microseconds.
fn quota_per_second(quota: i64, period: u64) -> u64 {
    match u64::try_from(quota) {
        Ok(quota) => {
            let exact = u128::from(quota) * u128::from(SECOND) / u128::from(period);
            let exact = u64::try_from(exact).unwrap_or(INFINITY);
            exact.checked_next_multiple_of(PERCENT).unwrap_or(INFINITY)
        }
        Err(_) => INFINITY,
    }
}

/// Converts a CPU list such as `0-2,4` to a bit mask, lowest byte first.
fn list_mask(list: &str) -> Option<Vec<u8>> {
    /// More CPUs than any kernel supports.
    const MAX_BITS: usize = 1 << 16;
    let mut mask = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= MAX_BITS {
            return None;
        }
        mask.resize(mask.len().max(last / 8 + 1), 0u8);
        for bit in first..=last {
            mask[bit / 8] |= 1 << (bit % 8);
        }
    }
    Some(mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties(json: &str) -> Vec<Property> {
        from_resources(&serde_json::from_str(json).unwrap())
    }

    #[test]
    fn limits_become_properties() {
        let all = r#"{"memory": {"limit": 1000, "swap": 1500, "reservation": 10},
            "cpu": {"shares": 1024, "quota": 50000, "period": 100000, "cpus": "0-1,9", "mems": "0"},
            "pids": {"limit": 100}, "unified": {"memory.high": "900", "memory.oom.group": "1"}}"#;
        let wanted: Vec<Property> = vec![
            ("MemoryMax", 1000u64.into()),
            ("MemorySwapMax", 500u64.into()),
            ("MemoryLow", 10u64.into()),
            ("CPUWeight", 39u64.into()),
            ("CPUQuotaPeriodUSec", 100_000u64.into()),
            ("CPUQuotaPerSecUSec", 500_000u64.into()),
            ("AllowedCPUs", vec![3u8, 2].into()),
            ("AllowedMemoryNodes", vec![1u8].into()),
            ("TasksMax", 100u64.into()),
            ("MemoryHigh", 900u64.into()),
        ];
        assert_eq!(properties(all), wanted);
    }

    #[test]
    fn unlimited_is_a_property_and_unset_is_none() {
        let none = r#"{"memory": {"limit": -1, "swap": -1}, "cpu": {"quota": -1}, "pids": {"limit": -1},
            "unified": {"memory.min": "max"}}"#;
        let wanted: Vec<Property> = vec![
            ("MemoryMax", INFINITY.into()),
            ("MemorySwapMax", INFINITY.into()),
            ("CPUQuotaPeriodUSec", PERIOD.into()),
            ("CPUQuotaPerSecUSec", INFINITY.into()),
            ("TasksMax", INFINITY.into()),
            ("MemoryMin", INFINITY.into()),
        ];
        assert_eq!(properties(none), wanted);
        let nothing = r#"{"memory": {"limit": 0}, "cpu": {"shares": 0, "quota": 0, "cpus": "", "mems": "x"},
            "pids": {"limit": 0}}"#;
        assert!(properties(nothing).is_empty());
    }

    #[test]
    fn quotas_are_rounded_up_to_what_systemd_keeps() {
        assert_eq!(quota_per_second(150_000, 100_000), 1_500_000);
        assert_eq!(quota_per_second(33_333, 100_000), 340_000);
        assert_eq!(quota_per_second(i64::MAX, 1), INFINITY);
    }

    #[test]
    fn lists_are_masks() {
        assert_eq!(list_mask("0,8-9").unwrap(), [1, 3]);
        for bad in ["", "3-1", "a", "0-99999999", "1,"] {
            assert_eq!(list_mask(bad), None, "{bad}");
        }
    }
}
