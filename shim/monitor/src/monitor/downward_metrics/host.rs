//! Metrics of the host, from /proc and /sys. Unknown values are left out.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::metric::{Metric, Value};

/// Metrics of the host at this moment. `proc` and `sys` are the mount points.
pub(super) fn metrics(proc: &Path, sys: &Path) -> Vec<Metric> {
    let mut found = Vec::new();
    if let Some(packages) = packages(&sys.join("devices/system/cpu")) {
        found.push(Metric::host("NumberOfPhysicalCPUs", Value::Int(packages), ""));
    }
    let read = |file: &str| fs::read_to_string(proc.join(file)).ok();
    let ticks_per_second = rustix::param::clock_ticks_per_second();
    if let Some(seconds) = read("stat").and_then(|text| cpu_seconds(&text, ticks_per_second)) {
        found.push(Metric::host("TotalCPUTime", Value::Real(seconds), "s"));
    }
    if let Some(text) = read("meminfo") {
        found.extend(memory(&text));
    }
    let page_size = rustix::param::page_size() as u64;
    if let Some(swapped) = read("vmstat").and_then(|text| swapped(&text, page_size)) {
        found.extend(swapped);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    found.push(Metric::host("Time", Value::Int(seconds), "s"));
    found
}

/// Number of processor packages.
fn packages(cpus: &Path) -> Option<i64> {
    let mut ids = HashSet::new();
    for cpu in fs::read_dir(cpus).ok()?.flatten() {
        let name = cpu.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("cpu"));
        if number.is_none_or(|number| number.parse::<u32>().is_err()) {
            continue;
        }
        // A processor that is offline has no topology.
        if let Ok(id) = fs::read_to_string(cpu.path().join("topology/physical_package_id")) {
            ids.insert(id.trim().to_owned());
        }
    }
    i64::try_from(ids.len()).ok().filter(|count| *count > 0)
}

/// Seconds in user mode, niced or not, and in the kernel, from `/proc/stat` (proc_stat(5)).
fn cpu_seconds(stat: &str, ticks_per_second: u64) -> Option<f64> {
    let mut fields = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_ascii_whitespace();
    let mut ticks = 0_u64;
    for _ in 0..3 {
        ticks = ticks.checked_add(fields.next()?.parse().ok()?)?;
    }
    Some(ticks as f64 / ticks_per_second as f64)
}

/// KubeVirt's sums of `/proc/meminfo` (proc_meminfo(5)). A field that is missing counts as 0.
fn memory(meminfo: &str) -> [Metric; 4] {
    let field = |name: &str| {
        let mut lines = meminfo.lines().filter_map(|line| line.split_once(':'));
        let value = lines
            .find(|(field, _)| *field == name)
            .map_or("", |(_, value)| value);
        let kib: u64 = value.trim().trim_end_matches(" kB").parse().unwrap_or(0);
        u128::from(kib)
    };
    let metric = |name, plus: &[&str], minus: &[&str]| {
        let sum = |names: &[&str]| names.iter().map(|name| field(name)).sum::<u128>();
        let kib = sum(plus).saturating_sub(sum(minus));
        Metric::host(name, Value::UInt(u64::try_from(kib).unwrap_or(u64::MAX)), "KiB")
    };
    [
        metric("FreePhysicalMemory", &["MemFree"], &[]),
        metric("FreeVirtualMemory", &["MemFree", "SwapFree"], &[]),
        metric(
            "MemoryAllocatedToVirtualServers",
            &["MemTotal"],
            &["MemFree", "Buffers", "Cached"],
        ),
        metric(
            "UsedVirtualMemory",
            &["MemTotal", "SwapTotal"],
            &["MemFree", "Cached", "Buffers", "SwapCached"],
        ),
    ]
}

/// Memory that the host has swapped in and out since its boot, from `/proc/vmstat`.
fn swapped(vmstat: &str, page_size: u64) -> Option<[Metric; 2]> {
    let metric = |name, field: &str| {
        let mut lines = vmstat.lines().filter_map(|line| line.split_once(' '));
        let pages: u64 = lines.find(|(name, _)| *name == field)?.1.trim().parse().ok()?;
        let kib = Value::UInt(pages.saturating_mul(page_size) / 1024);
        Some(Metric::host(name, kib, "KiB"))
    };
    Some([
        metric("PagedInMemory", "pswpin")?,
        metric("PagedOutMemory", "pswpout")?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(metrics: &[Metric], name: &str) -> Option<Value> {
        let metric = metrics.iter().find(|metric| metric.name == name)?;
        Some(metric.value.clone())
    }

    #[test]
    fn values_are_kubevirts_sums() {
        let host = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = host.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("stat", "cpu  1000 200 34 9999 1 2 3\ncpu0 1 2 3\n");
        write(
            "meminfo",
            "MemTotal: 10000 kB\nMemFree:  1000 kB\nBuffers: 200 kB\nCached: 3000 kB\nSwapCached: 50 kB\n\
             SwapTotal: 500 kB\nSwapFree: 400 kB\n",
        );
        write("vmstat", "nr_free_pages 7\npswpin 5\npswpout 6\npswpinx 9\n");
        for (cpu, package) in [("cpu0", "0"), ("cpu1", "0"), ("cpu2", "1"), ("cpufreq", "9")] {
            let file = format!("devices/system/cpu/{cpu}/topology/physical_package_id");
            write(&file, &format!("{package}\n"));
        }
        fs::create_dir(host.path().join("devices/system/cpu/cpu3")).unwrap();
        let found = metrics(host.path(), host.path());
        let tick = rustix::param::clock_ticks_per_second() as f64;
        let page = rustix::param::page_size() as u64 / 1024;
        for (name, expected) in [
            ("NumberOfPhysicalCPUs", Value::Int(2)),
            ("TotalCPUTime", Value::Real(1234.0 / tick)),
            ("FreePhysicalMemory", Value::UInt(1000)),
            ("FreeVirtualMemory", Value::UInt(1400)),
            ("MemoryAllocatedToVirtualServers", Value::UInt(5800)),
            ("UsedVirtualMemory", Value::UInt(6250)),
            ("PagedInMemory", Value::UInt(5 * page)),
            ("PagedOutMemory", Value::UInt(6 * page)),
        ] {
            assert_eq!(value(&found, name), Some(expected), "{name}");
        }
        assert_eq!(found.len(), 9);
    }

    #[test]
    fn what_cannot_be_read_is_left_out() {
        let none = tempfile::tempdir().unwrap();
        let found = metrics(none.path(), none.path());
        assert_eq!(
            found.iter().map(|metric| metric.name).collect::<Vec<_>>(),
            ["Time"]
        );
        for bad in [
            "",
            "cpu",
            "cpu  1 2",
            "cpu  1 2 x",
            "cpu  18446744073709551615 1 1",
        ] {
            assert_eq!(cpu_seconds(bad, 100), None, "{bad}");
        }
        assert_eq!(swapped("pswpin 1\n", 4096), None);
        let small = memory("MemTotal: 1 kB\nMemFree: 5 kB\n");
        assert_eq!(
            value(&small, "MemoryAllocatedToVirtualServers"),
            Some(Value::UInt(0))
        );
    }

    #[test]
    fn this_machine_has_all_of_them() {
        assert_eq!(metrics(Path::new("/proc"), Path::new("/sys")).len(), 9);
    }
}
