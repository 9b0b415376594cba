//! Report of the measured values.

use super::case::Case;
use super::cell::{CELLS, Cell};
use crate::figures::medians;
use crate::record::Record;
use crate::stats::summary;
use crate::svg::Panel;
use crate::targets::{Target, check, limit};

/// Minimum ratio to QEMU without vhost, for frames that pass through Husk's VMM.
const WITHOUT_VHOST: [(&str, f64); 3] = [("tcp_out", 1.3), ("tcp_in", 2.6), ("tcp_rr", 2.8)];

/// All targets.
fn targets() -> Vec<Target> {
    let target = |case: Case, cell: &Cell, least, of: Case, bound| Target {
        case: case.name(),
        metric: cell.metric.to_owned(),
        title: cell.title,
        least,
        of: of.name(),
        bound,
    };
    let with = CELLS
        .iter()
        .map(|cell| target(Case::HuskVhost, cell, 0.97, Case::Q35Vhost, Some(0.93)));
    let without = CELLS.iter().filter_map(|cell| {
        let (_, least) = WITHOUT_VHOST.iter().find(|(name, _)| *name == cell.name)?;
        Some(target(Case::Husk, cell, *least, Case::Q35, None))
    });
    without.chain(with).collect()
}

/// Baseline of a case's ratio.
fn base(case: &str) -> Option<&'static str> {
    if case == Case::HuskVhost.name() {
        Some(Case::Q35Vhost.name())
    } else {
        (case != Case::Q35.name()).then_some(Case::Q35.name())
    }
}

/// The tables, and the results of the targets.
pub fn text(record: &Record) -> String {
    let named = |metric: &'static str| {
        CELLS.iter().map(move |cell| {
            (
                format!("{}, {}", cell.title, cell.piece()),
                format!("{metric}_{}", cell.name),
            )
        })
    };
    let rates = CELLS
        .iter()
        .map(|cell| (format!("{}, {}", cell.title, cell.unit()), cell.metric.to_owned()));
    let cases = measured(record);
    let head = format!(
        "median (÷ {}; {} ÷ {})",
        Case::Q35.name(),
        Case::HuskVhost.name(),
        Case::Q35Vhost.name()
    );
    let table = |what: &str, rows: Vec<(String, String)>| {
        medians(record, &format!("{what}: {head}"), &cases, base, rows)
    };
    let mut parts = vec![
        setting(record),
        table("how much", rates.collect()),
        table("processor time, guest included, µs", named("cpu_us").collect()),
        table("of it the guest's own, µs", named("cpu_guest_us").collect()),
        table("KVM exits", named("kvm_exits").collect()),
        check(record, &targets()),
    ];
    parts.retain(|part| !part.is_empty());
    parts.join("\n\n")
}

/// The cases that have values.
fn measured(record: &Record) -> Vec<&'static str> {
    let has = |case: &&str| record.measurements.iter().any(|m| m.case == *case);
    Case::ALL.map(Case::name).into_iter().filter(has).collect()
}

/// Machine and versions of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    let of = |name| record.setting(name);
    format!(
        "{}, {} vCPU, {} MiB; {} ms of each load; {}",
        of("guest"),
        of("vcpus"),
        of("memory_mib"),
        of("time_ms"),
        record.machine(),
    )
}

/// The panels of the plot, one for each rate.
pub fn plot(record: &Record) -> Vec<Panel> {
    let cases = measured(record);
    let panel = |cell: &Cell| {
        let sum = |case: &str| summary(&record.values(case, cell.metric));
        let drawn: Vec<_> = cases
            .iter()
            .filter_map(|case| Some(((*case).to_owned(), sum(case)?)))
            .collect();
        // The line is drawn in the first row.
        let first = &drawn.first()?.0;
        Some(Panel {
            title: format!("{}, {}", cell.title, cell.unit()),
            limit: limit(record, &targets(), first, cell.metric),
            bars: drawn,
        })
    };
    CELLS.iter().filter_map(panel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Measurement;

    fn record(values: &[(Case, f64)]) -> Record {
        let mut record = Record::default();
        for (case, value) in values {
            record.measurements.push(Measurement {
                bench: "net".into(),
                case: case.name().into(),
                metric: "round_trips_s".into(),
                unit: "1/s".into(),
                value: *value,
                run: 1,
            });
        }
        record
    }

    #[test]
    fn with_vhost_one_is_compared_with_the_other() {
        let record = record(&[
            (Case::Husk, 300.0),
            (Case::HuskVhost, 400.0),
            (Case::Q35, 100.0),
            (Case::Q35Vhost, 200.0),
        ]);
        let text = text(&record);
        let row = text
            .lines()
            .find(|line| line.starts_with("round trips by TCP, 1/s"))
            .expect("a row");
        let words: Vec<&str> = row.split_whitespace().skip(5).collect();
        assert_eq!(
            words,
            ["300", "(3.00)", "400", "(2.00)", "100", "200", "(2.00)"],
            "{text}"
        );
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("ok")).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(plot(&record)[0].limit, Some(280.0));
    }

    #[test]
    fn every_load_has_a_bar_with_vhost_and_some_without() {
        assert_eq!(targets().len(), CELLS.len() + WITHOUT_VHOST.len());
    }
}
