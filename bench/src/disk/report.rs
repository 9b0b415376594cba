//! Report of the measured values.

use super::case::Case;
use super::cell::{CELLS, Cell};
use crate::figures::medians;
use crate::record::Record;
use crate::stats::summary;
use crate::svg::Panel;
use crate::targets::{Target, check, limit};

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

/// The tables, and the cases that are missing from them.
pub fn text(record: &Record, absent: &[(Case, String)]) -> String {
    let cases = measured(record);
    let rate = |cell: &Cell| (format!("{}, {}", cell.title, cell.unit()), cell.rate());
    let of = |what: &'static str, metric: &'static str| {
        move |cell: &Cell| {
            (
                format!("{}, {what}", cell.title),
                format!("{metric}_{}", cell.name),
            )
        }
    };
    let left_out: Vec<String> = absent
        .iter()
        .map(|(case, why)| format!("left out: {}: {why}", case.name()))
        .collect();
    let mut parts = vec![
        setting(record),
        figures(record, &cases, "how much", &rate),
        figures(record, &cases, "half take at most", &of("µs", "lat_p50_us")),
        figures(record, &cases, "99 of 100 take at most", &of("µs", "lat_p99_us")),
        figures(
            record,
            &cases,
            "processor time for one, guest included",
            &of("µs", "cpu_us"),
        ),
        figures(record, &cases, "of it the guest's own", &of("µs", "cpu_guest_us")),
        check(record, &targets()),
        left_out.join("\n"),
    ];
    parts.retain(|part| !part.is_empty());
    parts.join("\n\n")
}

/// The cases that have values.
fn measured(record: &Record) -> Vec<Case> {
    let has = |case: &Case| record.measurements.iter().any(|m| m.case == case.name());
    Case::ALL.into_iter().filter(has).collect()
}

/// Machine and versions of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    let of = |name| record.setting(name);
    format!(
        "{}, {} vCPU, {} MiB; disk of {} MiB in the host's cache ({}); {}",
        of("guest"),
        of("vcpus"),
        of("memory_mib"),
        of("disk_mib"),
        of("cache"),
        record.machine(),
    )
}

/// Medians of the metric that `metric` names for each kind of request, with their ratios to the base's.
fn figures(
    record: &Record,
    cases: &[Case],
    what: &str,
    metric: &dyn Fn(&Cell) -> (String, String),
) -> String {
    let head = format!("{what}: median (÷ {})", BASE.name());
    let names: Vec<&'static str> = cases.iter().map(|case| case.name()).collect();
    let base = |case: &str| (case != BASE.name()).then_some(BASE.name());
    medians(record, &head, &names, base, CELLS.iter().map(metric))
}

/// The panels of the plot, one for each rate.
pub fn plot(record: &Record) -> Vec<Panel> {
    let cases = measured(record);
    let panel = |cell: &Cell| {
        let metric = cell.rate();
        let sum = |case: Case| summary(&record.values(case.name(), &metric));
        let bars_of = cases
            .iter()
            .filter_map(|case| Some((case.name().to_owned(), sum(*case)?)));
        let drawn: Vec<_> = bars_of.collect();
        // The line is drawn in the first row.
        let first = &drawn.first()?.0;
        Some(Panel {
            title: format!("{}, {}", cell.title, cell.unit()),
            limit: limit(record, &targets(), first, &metric),
            bars: drawn,
        })
    };
    CELLS.iter().filter_map(panel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Measurement;

    fn record(values: &[(Case, &str, &[f64])]) -> Record {
        let mut record = Record::default();
        for (case, metric, values) in values {
            for (run, value) in (1..).zip(values.iter()) {
                record.measurements.push(Measurement {
                    bench: "disk".into(),
                    case: case.name().into(),
                    metric: (*metric).into(),
                    unit: "1/s".into(),
                    value: *value,
                    run,
                });
            }
        }
        record
    }

    #[test]
    fn the_table_has_ratios_to_the_base_and_no_case_without_values() {
        let record = record(&[
            (Case::Husk, "iops_rand4k_qd1", &[150.0]),
            (Case::Q35, "iops_rand4k_qd1", &[100.0]),
        ]);
        let text = text(&record, &[(Case::HuskScsi, "not served yet".into())]);
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
        assert!(text.ends_with("left out: husk-scsi: not served yet"), "{text}");
    }

    #[test]
    fn every_kind_that_is_held_exists() {
        assert_eq!(targets().len(), 3 * HELD.len() + WITHOUT_IOTHREAD.len());
    }

    #[test]
    fn the_plots_line_is_the_highest_figure_to_hold() {
        let record = record(&[
            (Case::Husk, "iops_rand4k_qd32", &[200.0]),
            (Case::Q35, "iops_rand4k_qd32", &[100.0]),
            (Case::Q35Iothread, "iops_rand4k_qd32", &[150.0]),
        ]);
        let panels = plot(&record);
        assert_eq!(panels.len(), 1);
        assert_eq!(panels[0].limit, Some(480.0));
        assert_eq!(panels[0].bars.len(), 3);
    }
}
