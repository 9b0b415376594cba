//! Report of the measured values.

use super::exits::Counts;
use super::profile::Profile;
use crate::guest::FLOOR;
use crate::limits::{Limit, held, panel};
use crate::record::Record;
use crate::stats::{Summary, summary};
use crate::svg::Panel;
use crate::table::{align, number};
use crate::vmm::Vmm;
use std::collections::{BTreeMap, BTreeSet};

/// A metric, its title in tables and, if it is drawn, its title in the plot.
type Line = (&'static str, &'static str, &'static str);

const KERNEL: &[Line] = &[
    (
        "to_userspace_ms",
        "start → user space, ms",
        "kernel and initrd: start → user space, ms",
    ),
    ("guest_clock_ms", "  of them by the guest's own clock", ""),
    ("before_clock_ms", "  before that clock starts", ""),
    ("vmm_to_userspace_ms", "  from the exec of husk-vmm, ms", ""),
    (
        "pre_kernel_ms",
        "start → kernel's first line, ms",
        "start → kernel's first line, ms",
    ),
    (
        "to_exit_ms",
        "start → exit after poweroff, ms",
        "start → exit after poweroff, ms",
    ),
    ("end_ms", "power-off → end, ms", "power-off → end, ms"),
    ("cpu_ms", "processor time, ms", "processor time until then, ms"),
    (
        "kvm_exits",
        "KVM exits before user space",
        "KVM exits before user space",
    ),
    ("kvm_exits_to_vmm", "  of them to the VMM's process", ""),
    (
        "vmm_rss_kib",
        "VMM beside guest memory, KiB",
        "resident beside guest memory, KiB",
    ),
    ("pod_rss_kib", "  with its monitor, KiB", ""),
];

const DISK: &[Line] = &[
    (
        "to_userspace_ms",
        "start → systemd's first line, ms",
        "stock Debian disk: start → systemd's first line, ms",
    ),
    ("guest_clock_ms", "  of them by the guest's own clock", ""),
    (
        "to_login_ms",
        "start → login prompt, ms",
        "stock Debian disk: start → login prompt, ms",
    ),
];

const LIMITS: &[Limit] = &[
    Limit {
        case: "husk",
        metric: "to_userspace_ms",
        what: "start → user space",
        most: 0.84,
        of: Some(("qemu-q35", "to_userspace_ms")),
    },
    Limit {
        case: "husk",
        metric: "to_userspace_ms",
        what: "start → user space",
        most: 0.95,
        of: Some(("qemu-microvm", "to_userspace_ms")),
    },
    Limit {
        case: "husk",
        metric: "to_userspace_ms",
        what: "start → user space",
        most: 1.1,
        of: Some((FLOOR, "to_userspace_ms")),
    },
    Limit {
        case: "husk",
        metric: "pre_kernel_ms",
        what: "start → kernel's first line",
        most: 1.1,
        of: Some((FLOOR, "pre_kernel_ms")),
    },
    Limit {
        case: "husk",
        metric: "kvm_exits",
        what: "KVM exits before user space",
        most: 3000.0,
        of: None,
    },
    Limit {
        case: "husk",
        metric: "vmm_rss_kib",
        what: "VMM beside guest memory, KiB",
        most: 4096.0,
        of: None,
    },
    Limit {
        case: "husk-disk",
        metric: "to_userspace_ms",
        what: "disk: start → systemd",
        most: 0.6,
        of: Some(("qemu-q35-disk", "to_userspace_ms")),
    },
];

/// Limits of boots whose clock counts instructions.
const COUNTED_LIMITS: &[Limit] = &[
    Limit {
        case: "husk",
        metric: "to_userspace_ms",
        what: "start → user space",
        most: 0.8,
        of: Some(("qemu-q35", "to_userspace_ms")),
    },
    Limit {
        case: "husk",
        metric: "to_userspace_ms",
        what: "start → user space",
        most: 1.1,
        of: Some((FLOOR, "to_userspace_ms")),
    },
    Limit {
        case: "husk",
        metric: "before_clock_ms",
        what: "before the guest's clock starts, ms",
        most: 400.0,
        of: None,
    },
    Limit {
        case: "husk",
        metric: "before_clock_ms",
        what: "before the guest's clock starts",
        most: 1.1,
        of: Some((FLOOR, "before_clock_ms")),
    },
    Limit {
        case: "husk",
        metric: "end_ms",
        what: "power-off → end, ms",
        most: 50.0,
        of: None,
    },
];

/// The tables of boots whose clock counts instructions.
pub fn counted(record: &Record) -> String {
    let cases = kernel_cases(record);
    let note = "a millisecond is 500,000 instructions";
    [
        format!("{}; {note}", setting(record)),
        figures(record, &cases, KERNEL),
        held(record, COUNTED_LIMITS),
    ]
    .join("\n\n")
}

/// The panels of their plot.
pub fn counted_plot(record: &Record) -> Vec<Panel> {
    let cases = kernel_cases(record);
    let drawn = KERNEL.iter().filter(|(_, _, title)| !title.is_empty());
    drawn
        .filter_map(|(metric, _, title)| panel(record, COUNTED_LIMITS, &cases, metric, title))
        .collect()
}

/// The tables.
pub fn text(record: &Record, profiles: &mut [Profile]) -> String {
    profiles.sort_by_key(|profile| Vmm::ALL.iter().position(|vmm| vmm.name() == profile.case));
    let kernel_cases = kernel_cases(record);
    let disk_cases = Vmm::WITH_DISK.map(Vmm::disk_name);
    let mut parts = vec![
        setting(record),
        figures(record, &kernel_cases, KERNEL),
        figures(record, &disk_cases, DISK),
        held(record, LIMITS),
    ];
    parts.extend(matrix(profiles, "exits, by reason", |profile| &profile.reasons));
    parts.extend(matrix(profiles, "exits to the VMM, by reason", |profile| {
        &profile.to_vmm
    }));
    parts.extend(matrix(profiles, "I/O ports", |profile| &profile.ports));
    parts.extend(matrix(profiles, "memory-mapped registers", |profile| {
        &profile.mmio
    }));
    parts.extend(details(profiles));
    parts.retain(|part| !part.is_empty());
    parts.join("\n\n")
}

/// Machine and versions of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    let of = |name| record.setting(name);
    format!(
        "{}, {} vCPU, {} MiB; {}",
        of("guest"),
        of("vcpus"),
        of("memory_mib"),
        record.machine(),
    )
}

/// The cases with a kernel and an initrd, without those that were not measured.
fn kernel_cases(record: &Record) -> Vec<String> {
    let measured = |name: &str| record.measurements.iter().any(|m| m.case == name);
    let cases = Vmm::ALL.into_iter();
    let cases = cases.filter(|vmm| *vmm == Vmm::Husk || measured(vmm.name()));
    cases.map(|vmm| vmm.name().to_owned()).collect()
}

/// Medians, scatter and the ratios of Husk's medians to the others'.
fn figures(record: &Record, cases: &[String], lines: &[Line]) -> String {
    let mut head = vec![String::from("median (p10 … p90)")];
    head.extend(cases.iter().cloned());
    head.extend(cases[1..].iter().rev().map(|case| format!("÷ {case}")));
    let mut rows = vec![head];
    for (metric, label, _) in lines {
        let sums: Vec<_> = cases
            .iter()
            .map(|case| summary(&record.values(case, metric)))
            .collect();
        if sums.iter().all(Option::is_none) {
            continue;
        }
        let mut row = vec![(*label).to_owned()];
        row.extend(sums.iter().map(|sum| sum.map_or("–".to_owned(), cell)));
        row.extend(sums[1..].iter().rev().map(|other| match (sums[0], other) {
            (Some(husk), Some(other)) => format!("{:.2}", husk.median / other.median),
            _ => String::new(),
        }));
        rows.push(row);
    }
    if rows.len() == 1 {
        String::new()
    } else {
        align(&rows, 1)
    }
}

fn cell(sum: Summary) -> String {
    if sum.count == 1 {
        return number(sum.median);
    }
    format!(
        "{} ({} … {})",
        number(sum.median),
        number(sum.p10),
        number(sum.p90)
    )
}

/// The panels of the plot.
pub fn plot(record: &Record) -> Vec<Panel> {
    let kernel = kernel_cases(record);
    let disk = Vmm::WITH_DISK.map(Vmm::disk_name);
    let of = |cases: &[String], lines: &'static [Line]| -> Vec<Panel> {
        let drawn = lines.iter().filter(|(_, _, title)| !title.is_empty());
        drawn
            .filter_map(|(metric, _, title)| panel(record, LIMITS, cases, metric, title))
            .collect()
    };
    let mut panels = of(&kernel, KERNEL);
    panels.extend(of(&disk, DISK));
    panels
}

/// Maximum number of rows of a matrix; the others are summed up in one row.
const TOP: usize = 12;

/// The largest counts of all cases, side by side.
fn matrix(profiles: &[Profile], what: &str, of: impl Fn(&Profile) -> &Counts) -> Option<String> {
    let mut totals: BTreeMap<&String, u64> = BTreeMap::new();
    for (key, count) in profiles.iter().flat_map(&of) {
        *totals.entry(key).or_insert(0) += count;
    }
    if totals.is_empty() {
        return None;
    }
    let mut keys: Vec<_> = totals.into_iter().collect();
    keys.sort_by_key(|(_, total)| std::cmp::Reverse(*total));
    let top: BTreeSet<&String> = keys.iter().take(TOP).map(|(key, _)| *key).collect();
    let mut rows = vec![vec![what.to_owned()]];
    rows[0].extend(profiles.iter().map(|profile| profile.case.clone()));
    for (key, _) in keys.iter().take(TOP) {
        let mut row = vec![format!("  {key}")];
        row.extend(profiles.iter().map(|profile| match of(profile).get(*key) {
            Some(count) => number_of(*count),
            None => "–".to_owned(),
        }));
        rows.push(row);
    }
    if keys.len() > TOP {
        let mut row = vec![format!("  {} others", keys.len() - TOP)];
        row.extend(profiles.iter().map(|profile| {
            let rest = of(profile).iter().filter(|(key, _)| !top.contains(key));
            number_of(rest.map(|(_, count)| count).sum())
        }));
        rows.push(row);
    }
    Some(align(&rows, 1))
}

fn number_of(count: u64) -> String {
    if count < 10 {
        count.to_string()
    } else {
        number(count as f64)
    }
}

/// Breakdown of each case's time and memory.
fn details(profiles: &[Profile]) -> Vec<String> {
    let lines = |what: &str, of: &dyn Fn(&Profile) -> Vec<String>| {
        let mut rows = vec![what.to_owned()];
        rows.extend(
            profiles
                .iter()
                .map(|profile| format!("  {}: {}", profile.case, of(profile).join(", "))),
        );
        rows.join("\n")
    };
    if profiles.is_empty() {
        return Vec::new();
    }
    vec![
        lines("traced: milliseconds from the start", &|profile| {
            profile
                .steps
                .iter()
                .map(|(name, ms)| format!("{name} {ms:.0}"))
                .collect()
        }),
        lines("resident beside guest memory, KiB", &|profile| {
            let mut parts: Vec<_> = profile.memory.iter().collect();
            parts.sort_by_key(|(_, kib)| std::cmp::Reverse(**kib));
            parts
                .iter()
                .take(8)
                .map(|(name, kib)| format!("{name} {kib}"))
                .collect()
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Measurement;

    fn record(values: &[(&str, &str, f64)]) -> Record {
        let measurements = values
            .iter()
            .map(|(case, metric, value)| Measurement {
                bench: "boot".into(),
                case: (*case).into(),
                metric: (*metric).into(),
                unit: "ms".into(),
                value: *value,
                run: 1,
            })
            .collect();
        Record {
            measurements,
            ..Record::default()
        }
    }

    #[test]
    fn the_table_compares_husk_with_each() {
        let record = record(&[
            ("husk", "to_userspace_ms", 50.0),
            ("qemu-q35", "to_userspace_ms", 100.0),
            ("qemu-microvm", "to_userspace_ms", 80.0),
        ]);
        let text = figures(&record, &kernel_cases(&record), KERNEL);
        let row = text.lines().last().expect("a row");
        let cells: Vec<&str> = row.split_whitespace().rev().take(5).collect();
        assert_eq!(cells, ["0.62", "0.50", "100", "80", "50"]);
        assert_eq!(plot(&record)[0].limit, Some(76.0));
    }

    #[test]
    fn small_counts_are_added_up() {
        let counts: Counts = (0..20).map(|n| (format!("port {n}"), n + 1)).collect();
        let profile = Profile {
            case: "husk".into(),
            reasons: counts,
            to_vmm: Counts::new(),
            ports: Counts::new(),
            mmio: Counts::new(),
            memory: BTreeMap::new(),
            steps: Vec::new(),
        };
        let text = matrix(&[profile], "ports", |profile| &profile.reasons).expect("a table");
        assert_eq!(text.lines().count(), 14);
        assert!(
            text.lines().nth(1).is_some_and(|line| line.contains("port 19")),
            "{text}"
        );
        assert!(text.ends_with("36"), "{text}");
    }
}
