//! Report of the measured values.

use super::case::{Case, MORE_MIB};
use crate::cases::{BenchCase, names};
use crate::figures::medians;
use crate::record::Record;
use crate::svg::Panel;
use crate::table::{align, join, number, verdict};

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

/// Time that a restore may take beyond the time before the kernel's clock of a boot, in ms.
const BEYOND_BOOT_MS: f64 = 300.0;
/// Most of a restore's time, in relation to QEMU's.
const RESTORE: f64 = 0.5;
/// Most of the time to save, in relation to QEMU's.
const SAVE: f64 = 1.0;
/// Memory that a clone may have beside what it has written, in MiB.
const BESIDE_MIB: u64 = 16;
/// The file of the guest's memory, in MiB.
const FILE_MIB: u64 = 1024;

/// A limit with a measured value.
#[derive(Debug, PartialEq)]
pub struct Bar {
    what: &'static str,
    value: f64,
    most: f64,
    /// The parts of the limit, for people.
    of: String,
}

impl Bar {
    /// True if the value is within the limit.
    pub fn is_met(&self) -> bool {
        self.value <= self.most
    }
}

/// The limits whose values were measured.
pub fn bars(record: &Record) -> Vec<Bar> {
    let median = |case: Case, metric: &str| record.median(case.name(), metric);
    let mut bars = Vec::new();
    if let Some(value) = median(Case::Husk, "restore_ms") {
        let what = "restore → guest answers, ms";
        bars.extend(median(Case::Husk, "pre_kernel_ms").map(|boot| Bar {
            what,
            value,
            most: boot + BEYOND_BOOT_MS,
            of: format!("start → kernel's first line + {BEYOND_BOOT_MS} ms"),
        }));
        bars.extend(relative(what, value, RESTORE, "restore_ms", &median));
    }
    if let Some(value) = median(Case::Husk, "save_ms") {
        bars.extend(relative("save, ms", value, SAVE, "save_ms", &median));
    }
    let count = record.values(Case::Husk.name(), "clone_mib").len() as u64;
    bars.extend(median(Case::Husk, "clones_mib").map(|value| Bar {
        what: "clones with the file once, MiB",
        value,
        most: (count * (MORE_MIB + BESIDE_MIB) + FILE_MIB) as f64,
        of: format!("{count} × ({MORE_MIB} + {BESIDE_MIB}) + {FILE_MIB}"),
    }));
    bars
}

fn relative(
    what: &'static str,
    value: f64,
    factor: f64,
    metric: &str,
    median: &impl Fn(Case, &str) -> Option<f64>,
) -> Vec<Bar> {
    let others = [Case::Q35, Case::Q35Mapped].into_iter();
    let bar = |case: Case| {
        Some(Bar {
            what,
            value,
            most: factor * median(case, metric)?,
            of: format!("{factor} × {}", case.name()),
        })
    };
    others.filter_map(bar).collect()
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
    let rows: Vec<_> = bars(record).iter().map(row).collect();
    join([setting(record), times, clones, align(&rows, 2)])
}

fn row(bar: &Bar) -> Vec<String> {
    let limit = format!("≤ {} = {}", number(bar.most), bar.of);
    let verdict = verdict(bar.is_met()).to_owned();
    vec![verdict, bar.what.to_owned(), number(bar.value), limit]
}

/// The panels of the plot.
pub fn plot(record: &Record) -> Vec<Panel> {
    let lowest = |metric: &str| {
        let bars = bars(record).into_iter();
        let of_metric = bars.filter(|bar| match metric {
            "restore_ms" => bar.what.starts_with("restore"),
            "save_ms" => bar.what.starts_with("save"),
            _ => false,
        });
        of_metric.map(|bar| bar.most).reduce(f64::min)
    };
    let panel = |metric: &str, label: &str, cases: &[&str], limit| {
        let bars = record.bars(cases, metric);
        (!bars.is_empty()).then(|| Panel {
            title: label.trim().to_owned(),
            bars,
            limit,
        })
    };
    let cases = names::<Case>();
    let drawn = METRICS.into_iter().filter(|(.., drawn)| *drawn);
    let panels = drawn.filter_map(|(metric, label, _)| panel(metric, label, &cases, lowest(metric)));
    let (metric, label) = CLONES[0];
    let limit = Some((MORE_MIB + BESIDE_MIB) as f64);
    panels
        .chain(panel(metric, label, &[Case::Husk.name()], limit))
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
        let met: Vec<bool> = bars(&record).iter().map(Bar::is_met).collect();
        assert_eq!(met, [true, true, false, false]);
        let text = text(&record);
        let last = text.lines().last().expect("a bar");
        assert!(last.starts_with("MISSED  save, ms"), "{text}");
        assert!(last.ends_with("≤ 499 = 1 × qemu-q35"), "{text}");
        assert_eq!(plot(&record)[1].limit, Some(400.0));
    }

    #[test]
    fn the_clones_bar_depends_on_their_number() {
        let mut values = vec![("husk", "clones_mib", 1184.5)];
        values.extend([("husk", "clone_mib", 80.0); 2]);
        let bars = bars(&Record::example(values));
        assert_eq!(bars.len(), 1);
        assert!((bars[0].most - 1184.0).abs() < 1e-9 && !bars[0].is_met());
    }

    #[test]
    fn what_was_not_measured_has_no_bar() {
        assert_eq!(bars(&Record::default()), []);
        assert!(plot(&Record::default()).is_empty());
    }
}
