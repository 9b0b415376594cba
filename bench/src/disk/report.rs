//! Report of the measured values.

use super::case::Case;
use super::cell::{CELLS, Cell};
use crate::cases::{BenchCase, measured};
use crate::figures::medians;
use crate::record::Record;
use crate::svg::Panel;
use crate::table::join;
use crate::targets::{Target, check, panels};

/// Baseline of every other case.
const BASE: Case = Case::Q35;

/// Kinds of requests that have targets against every case.
const HELD: [&str; 3] = ["rand4k_qd1", "rand4k_qd32", "seq1m"];

/// Minimum ratios to QEMU's defaults.
const WITHOUT_IOTHREAD: [(&str, f64); 4] = [
    ("rand4k_qd1", 2.3),
    ("rand4k_qd32", 4.8),
    ("seq128k", 1.4),
    ("seq1m", 1.1),
];

/// All targets.
fn targets() -> Vec<Target> {
    let target = |case: Case, of: Case, (name, least): (&str, f64), bound| {
        let cell = CELLS.iter().find(|cell| cell.name == name)?;
        Some(Target {
            case: case.name(),
            metric: cell.rate(),
            title: cell.title,
            least,
            of: of.name(),
            bound,
        })
    };
    let held = [
        (Case::Husk, Case::Q35Iothread, 0.97, Some(0.93)),
        (Case::HuskScsi, Case::Husk, 0.9, None),
        (Case::HuskQcow2, Case::Q35Qcow2, 0.8, None),
    ];
    let held = held.into_iter().flat_map(|(case, of, least, bound)| {
        HELD.into_iter()
            .filter_map(move |name| target(case, of, (name, least), bound))
    });
    let defaults = WITHOUT_IOTHREAD
        .into_iter()
        .filter_map(|least| target(Case::Husk, Case::Q35, least, None));
    defaults.chain(held).collect()
}

/// The tables, and the results of the targets.
pub fn text(record: &Record) -> String {
    let table = |what: &str, metrics: &dyn Fn(&Cell) -> (String, String)| {
        let head = format!("{what}: median (÷ {})", BASE.name());
        let base = |case: &str| (case != BASE.name()).then_some(BASE.name());
        medians(
            record,
            &head,
            &measured::<Case>(record),
            base,
            CELLS.iter().map(metrics),
        )
    };
    let named = |metric: &'static str| {
        move |cell: &Cell| (format!("{metric}_{}", cell.name), format!("{}, µs", cell.title))
    };
    join([
        setting(record),
        table("how much", &rate),
        table("half take at most", &named("lat_p50_us")),
        table("99 of 100 take at most", &named("lat_p99_us")),
        table("processor time for one, guest included", &named("cpu_us")),
        table("of it the guest's own", &named("cpu_guest_us")),
        check(record, &targets()),
    ])
}

/// Metric and title of the rate.
fn rate(cell: &Cell) -> (String, String) {
    (cell.rate(), format!("{}, {}", cell.title, cell.unit()))
}

/// Machine and versions of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    format!(
        "{}; disk of {} MiB in the host's cache ({}); {}",
        record.guest(),
        record.setting("disk_mib"),
        record.setting("cache"),
        record.machine(),
    )
}

/// The panels of the plot, one for each rate.
pub fn plot(record: &Record) -> Vec<Panel> {
    panels(
        record,
        &targets(),
        &measured::<Case>(record),
        CELLS.iter().map(rate),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_ratios_to_the_base_and_no_case_without_values() {
        let record = Record::example([
            (Case::Husk.name(), "iops_rand4k_qd1", 150.0),
            (Case::Q35.name(), "iops_rand4k_qd1", 100.0),
        ]);
        let text = text(&record);
        let head = text
            .lines()
            .find(|line| line.starts_with("how much"))
            .expect("a head");
        assert!(head.ends_with("husk  qemu-q35"), "{text}");
        let row = text
            .lines()
            .find(|line| line.starts_with("random reads of 4 KiB, depth 1,"));
        let row: Vec<&str> = row.expect("a row").split_whitespace().rev().take(3).collect();
        assert_eq!(row, ["100", "(1.50)", "150"]);
    }

    #[test]
    fn every_kind_that_is_held_exists() {
        assert_eq!(targets().len(), 3 * HELD.len() + WITHOUT_IOTHREAD.len());
    }

    #[test]
    fn the_plots_line_is_the_highest_figure_to_hold() {
        let record = Record::example([
            (Case::Husk.name(), "iops_rand4k_qd32", 200.0),
            (Case::Q35.name(), "iops_rand4k_qd32", 100.0),
            (Case::Q35Iothread.name(), "iops_rand4k_qd32", 150.0),
        ]);
        let panels = plot(&record);
        assert_eq!(panels.len(), 1);
        assert_eq!(panels[0].limit, Some(480.0));
        assert_eq!(panels[0].bars.len(), 3);
    }
}
