//! Report of the measured values.

use super::case::{Case, MORE_MIB};
use crate::cases::{BenchCase, names};
use crate::figures::medians;
use crate::limits::{Limit, held, panel};
use crate::record::Record;
use crate::svg::Panel;
use crate::table::join;

/// Metrics, their titles, and whether they are drawn.
const METRICS: [(&str, &str, bool); 6] = [
    ("save_ms", "save, ms", true),
    (
        "live_pause_ms",
        "  live: longest time without an answer, ms",
        true,
    ),
    ("save_synced_ms", "  until it is on the disk, ms", true),
    ("saved_mib", "  space on the disk, MiB", false),
    ("restore_ms", "restore: start → guest answers, ms", true),
    ("pre_kernel_ms", "boot: start → kernel's first line, ms", true),
];
const CLONES: [(&str, &str); 4] = [
    ("clone_mib", "a clone's own memory, MiB"),
    ("clone_vmm_mib", "  of its VMM, MiB"),
    ("clones_file_mib", "the file of the guest's memory, MiB"),
    ("clones_mib", "all clones with the file once, MiB"),
];

/// Memory that a clone may have beside what it has written, in MiB.
const BESIDE_MIB: u64 = 16;
/// The file of the guest's memory, in MiB.
const FILE_MIB: u64 = 1024;

/// The limits. That of all clones depends on their number.
fn limits(record: &Record) -> [Limit; 6] {
    let restore = |of| Limit::of_husk("restore_ms", "restore → guest answers", 0.5).times(of);
    let save = |of| Limit::of_husk("save_ms", "save", 1.0).times(of);
    let beyond_boot = "restore → guest answers, beyond a boot's start → kernel's first line, ms";
    let count = record.values(Case::Husk.name(), "clone_mib").len() as u64;
    let clones = (count * (MORE_MIB + BESIDE_MIB) + FILE_MIB) as f64;
    [
        Limit::of_husk("restore_ms", beyond_boot, 300.0).beyond("husk", "pre_kernel_ms"),
        restore(Case::Q35.name()),
        restore(Case::Q35Mapped.name()),
        save(Case::Q35.name()),
        save(Case::Q35Mapped.name()),
        Limit::of_husk("clones_mib", "clones with the file once, MiB", clones),
    ]
}

/// Number of limits that are missed.
pub fn missed(record: &Record) -> usize {
    let limits = limits(record);
    let missed = limits.iter().filter(|limit| limit.is_met(record) == Some(false));
    missed.count()
}

/// Machine and versions of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    let written = record.setting("written_mib");
    format!(
        "{}, of which {written} MiB are written; {}",
        record.guest(),
        record.machine()
    )
}

/// The tables, and the result of each limit.
pub fn text(record: &Record) -> String {
    let base = |case: &str| (case == Case::Husk.name()).then_some(Case::Q35.name());
    let metrics = METRICS.map(|(metric, label, _)| (metric, label));
    let times = medians(record, "median (÷ qemu-q35)", &names::<Case>(), base, metrics);
    let head = format!("median of {} clones", record.setting("clones"));
    let clones = medians(record, &head, &[Case::Husk.name()], |_| None, CLONES);
    join([setting(record), times, clones, held(record, &limits(record))])
}

/// The panels of the plot.
pub fn plot(record: &Record) -> Vec<Panel> {
    let (cases, limits) = (names::<Case>(), limits(record));
    let drawn = METRICS.into_iter().filter(|(.., drawn)| *drawn);
    let panels = drawn.filter_map(|(metric, label, _)| panel(record, &limits, &cases, metric, label.trim()));
    let (metric, label) = CLONES[0];
    let clone = Limit::of_husk(metric, label, (MORE_MIB + BESIDE_MIB) as f64);
    panels
        .chain(panel(record, &[clone], &cases, metric, label))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bar_is_met_or_missed() {
        let record = Record::example([
            (Case::Husk.name(), "restore_ms", 450.0),
            (Case::Husk.name(), "pre_kernel_ms", 160.0),
            (Case::Q35.name(), "restore_ms", 1000.0),
            (Case::Q35Mapped.name(), "restore_ms", 800.0),
            (Case::Husk.name(), "save_ms", 500.0),
            (Case::Q35.name(), "save_ms", 499.0),
        ]);
        let limits = limits(&record);
        let met: Vec<bool> = limits.iter().filter_map(|limit| limit.is_met(&record)).collect();
        assert_eq!((met, missed(&record)), (vec![true, true, false, false], 2));
        let text = text(&record);
        let last = text.lines().last().expect("a bar");
        assert!(last.starts_with("MISSED  save"), "{text}");
        assert!(last.ends_with("≤ 1.00 × qemu-q35"), "{text}");
        assert_eq!(plot(&record)[1].limit, Some(400.0));
    }

    #[test]
    fn the_clones_bar_depends_on_their_number() {
        let mut values = vec![("husk", "clones_mib", 1184.5)];
        values.extend([("husk", "clone_mib", 80.0); 2]);
        let record = Record::example(values);
        let text = held(&record, &limits(&record));
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.starts_with("MISSED") && text.ends_with("≤ 1184"), "{text}");
    }

    #[test]
    fn what_was_not_measured_has_no_bar() {
        let record = Record::default();
        assert_eq!(
            (held(&record, &limits(&record)).as_str(), missed(&record)),
            ("", 0)
        );
        assert!(plot(&record).is_empty());
    }
}
