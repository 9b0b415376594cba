//! Report of the measured values.

use super::exits::Counts;
use super::profile::Profile;
use crate::cases::BenchCase;
use crate::figures::scatter;
use crate::guest::FLOOR;
use crate::limits::{Limit, held, panels};
use crate::record::Record;
use crate::svg::Panel;
use crate::table::{align, join, number};
use crate::vmm::Vmm;
use std::collections::{BTreeMap, BTreeSet};

/// A metric, its title in tables and, if it is drawn, its title in the plot.
type Line = (&'static str, &'static str, &'static str);

/// Time that unpacking takes in a boot, divided by that of `xz`.
pub const UNPACKING: &str = "unpacking_by_xz";

const KERNEL: &[Line] = &[
    (
        "to_userspace_ms",
        "start → user space, ms",
        "kernel and initrd: start → user space, ms",
    ),
    ("untraced_to_userspace_ms", "  without tracing", ""),
    ("elf_to_userspace_ms", "  and with the kernel unpacked before", ""),
    ("xz_ms", "  xz -dc of the kernel, ms", ""),
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
    Limit::of_husk("to_userspace_ms", "start → user space", 0.84).times("qemu-q35"),
    Limit::of_husk("to_userspace_ms", "start → user space", 0.95).times("qemu-microvm"),
    Limit::of_husk("to_userspace_ms", "start → user space", 1.1).times(FLOOR),
    Limit::of_husk("pre_kernel_ms", "start → kernel's first line", 1.1).times(FLOOR),
    Limit::of_husk("kvm_exits", "KVM exits before user space", 3000.0),
    Limit::of_husk("vmm_rss_kib", "VMM beside guest memory, KiB", 4096.0),
    Limit::at_most("husk-disk", "to_userspace_ms", "disk: start → systemd", 0.6).times("qemu-q35-disk"),
];

/// Limits of boots whose clock counts instructions.
const COUNTED_LIMITS: &[Limit] = &[
    Limit::of_husk("to_userspace_ms", "start → user space", 0.8).times("qemu-q35"),
    Limit::of_husk("to_userspace_ms", "start → user space", 1.1).times(FLOOR),
    Limit::of_husk("before_clock_ms", "before the guest's clock starts, ms", 400.0),
    Limit::of_husk("before_clock_ms", "before the guest's clock starts", 1.1).times(FLOOR),
    Limit::of_husk("end_ms", "power-off → end, ms", 50.0),
];

/// Limits of boots of a kernel that xz packed, in place of the others: those are for other kernels.
const UNPACKING_LIMITS: &[Limit] = &[Limit::of_husk(UNPACKING, "unpacking the kernel ÷ xz -dc", 1.3)];

/// `limits`, or those of unpacking if that was measured.
fn limits(record: &Record, limits: &'static [Limit]) -> &'static [Limit] {
    match record.median("husk", UNPACKING) {
        Some(_) => UNPACKING_LIMITS,
        None => limits,
    }
}

/// The tables of boots whose clock counts instructions.
pub fn counted(record: &Record) -> String {
    let cases = kernel_cases(record);
    let note = "a millisecond is 500,000 instructions";
    join([
        format!("{}; {note}", setting(record)),
        figures(record, &cases, KERNEL),
        held(record, limits(record, COUNTED_LIMITS)),
    ])
}

/// The panels of their plot.
pub fn counted_plot(record: &Record) -> Vec<Panel> {
    panels(record, COUNTED_LIMITS, &kernel_cases(record), drawn(KERNEL))
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
        held(record, limits(record, LIMITS)),
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
    join(parts)
}

/// Machine and versions of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    format!("{}; {}", record.guest(), record.machine())
}

/// The cases with a kernel and an initrd, without those that were not measured.
fn kernel_cases(record: &Record) -> Vec<&'static str> {
    let cases = Vmm::ALL.map(Vmm::name).into_iter();
    cases
        .filter(|case| *case == Vmm::Husk.name() || record.has(case))
        .collect()
}

/// Medians, scatter and the ratios of Husk's medians to the others'.
fn figures<S: AsRef<str>>(record: &Record, cases: &[S], lines: &'static [Line]) -> String {
    let lines = lines.iter().map(|(metric, label, _)| (*metric, *label));
    scatter(record, cases, lines)
}

/// Those of `lines` that are drawn, as metric and title.
fn drawn(lines: &'static [Line]) -> impl Iterator<Item = (&'static str, &'static str)> {
    let titles = lines.iter().map(|(metric, _, title)| (*metric, *title));
    titles.filter(|(_, title)| !title.is_empty())
}

/// The panels of the plot.
pub fn plot(record: &Record) -> Vec<Panel> {
    let disk = Vmm::WITH_DISK.map(Vmm::disk_name);
    let mut all = panels(record, LIMITS, &kernel_cases(record), drawn(KERNEL));
    all.extend(panels(record, LIMITS, &disk, drawn(DISK)));
    all
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

    #[test]
    fn the_table_compares_husk_with_each() {
        let record = Record::example([
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
