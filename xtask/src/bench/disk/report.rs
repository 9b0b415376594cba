//! What the figures say, for people.

use super::case::Case;
use super::cell::{CELLS, Cell};
use crate::bench::record::Record;
use crate::bench::stats::{lower_bound, summary};
use crate::bench::svg::Panel;
use crate::bench::table::{align, number};

/// What every other case is compared with.
const BASE: Case = Case::Q35;

/// A figure to hold: a rate of one case, at least so many times another's.
#[derive(Debug)]
struct Bar {
    case: Case,
    cell: &'static str,
    least: f64,
    of: Case,
    /// The lower bound of the median of pairs is to be at least that.
    bound: Option<f64>,
}

/// Kinds of requests that have figures to hold.
const HELD: [&str; 3] = ["rand4k_qd1", "rand4k_qd32", "seq1m"];

/// All of them: beside QEMU as one gets it, each kind has its own.
fn bars() -> Vec<Bar> {
    let of = |case, of, least: [f64; 3], bound| {
        HELD.iter().zip(least).map(move |(cell, least)| Bar {
            case,
            cell,
            least,
            of,
            bound,
        })
    };
    let mut bars = Vec::new();
    bars.extend(of(Case::Husk, Case::Q35Iothread, [0.97; 3], Some(0.93)));
    bars.extend(of(Case::Husk, Case::Q35, [1.25, 1.8, 1.1], None));
    bars.extend(of(Case::HuskScsi, Case::Husk, [0.9; 3], None));
    bars.extend(of(Case::HuskQcow2, Case::Q35Qcow2, [0.8; 3], None));
    bars
}

/// The tables, and what is not in them.
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
        held(record),
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

/// Where and with what it was measured, in a line.
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

/// Medians of what `metric` names for each kind of request, each with its ratio to the base's.
fn figures(
    record: &Record,
    cases: &[Case],
    what: &str,
    metric: &dyn Fn(&Cell) -> (String, String),
) -> String {
    let mut head = vec![format!("{what}: median (÷ {})", BASE.name())];
    head.extend(cases.iter().map(|case| case.name().to_owned()));
    let mut rows = vec![head];
    for cell in CELLS {
        let (label, metric) = metric(cell);
        let median = |case: Case| Some(summary(&record.values(case.name(), &metric))?.median);
        if cases.iter().all(|case| median(*case).is_none()) {
            continue;
        }
        let mut row = vec![label];
        row.extend(cases.iter().map(|case| match (median(*case), median(BASE)) {
            (None, _) => "–".to_owned(),
            (Some(value), Some(base)) if *case != BASE => {
                format!("{} ({:.2})", number(value), value / base)
            }
            (Some(value), _) => number(value),
        }));
        rows.push(row);
    }
    if rows.len() == 1 {
        String::new()
    } else {
        align(&rows, 1)
    }
}

/// Each figure to hold, and whether it is held.
fn held(record: &Record) -> String {
    let mut rows = Vec::new();
    for bar in bars() {
        let Some(cell) = CELLS.iter().find(|cell| cell.name == bar.cell) else {
            continue;
        };
        let pairs = pairs(record, &bar, cell);
        let Some(ratio) = summary(&pairs) else {
            continue;
        };
        let low = lower_bound(&pairs);
        let (wanted, bounded) = match (bar.bound, low) {
            (None, _) => (String::new(), true),
            (Some(bound), None) => (format!(", with 95 % ≥ {bound}: too few rounds to say"), true),
            (Some(bound), Some(low)) => (format!(", with 95 % ≥ {bound}: {low:.2}"), low >= bound),
        };
        let good = ratio.median >= bar.least && bounded;
        rows.push(vec![
            if good { "ok" } else { "MISSED" }.to_owned(),
            bar.case.name().to_owned(),
            cell.title.to_owned(),
            format!("{:.2}", ratio.median),
            format!("≥ {} × {}{wanted}", bar.least, bar.of.name()),
        ]);
    }
    align(&rows, 3)
}

/// How many times the other case's rate this one's was, in each round that has both.
fn pairs(record: &Record, bar: &Bar, cell: &Cell) -> Vec<f64> {
    let metric = cell.rate();
    let of = |case: Case| {
        let values = record.measurements.iter();
        values.filter(move |m| m.case == case.name())
    };
    let mut pairs = Vec::new();
    for own in of(bar.case).filter(|own| own.metric == metric) {
        let same = |other: &&_| {
            let other: &crate::bench::record::Measurement = other;
            other.metric == metric && other.run == own.run
        };
        if let Some(other) = of(bar.of).find(same) {
            pairs.push(own.value / other.value);
        }
    }
    pairs
}

/// The plot's parts: a rate each.
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
        let first = drawn.first()?.0.clone();
        let limits = bars()
            .into_iter()
            .filter(|bar| bar.cell == cell.name && bar.case.name() == first)
            .filter_map(|bar| Some(bar.least * sum(bar.of)?.median));
        Some(Panel {
            title: format!("{}, {}", cell.title, cell.unit()),
            limit: limits.reduce(f64::max),
            bars: drawn,
        })
    };
    CELLS.iter().filter_map(panel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::Measurement;

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
    fn figures_are_held_by_pairs_of_the_same_round() {
        let record = record(&[
            // The machine was twice as fast in the second round; each pair is as good as the other.
            (Case::Husk, "iops_rand4k_qd1", &[130.0, 260.0, 132.0]),
            (Case::Q35, "iops_rand4k_qd1", &[100.0, 200.0, 100.0]),
            (Case::Q35Iothread, "iops_rand4k_qd1", &[150.0, 300.0, 150.0]),
        ]);
        let text = held(&record);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(
            lines[0].starts_with("MISSED") && lines[0].contains("0.87"),
            "{text}"
        );
        assert!(lines[1].starts_with("ok ") && lines[1].contains("1.30"), "{text}");
    }

    #[test]
    fn a_good_median_is_not_enough_where_a_bound_is_asked_for() {
        let mut own = [100.0; 10];
        let base = [100.0; 10];
        let verdict = |own: &[f64]| {
            let record = record(&[
                (Case::Husk, "mib_s_seq1m", own),
                (Case::Q35Iothread, "mib_s_seq1m", &base),
            ]);
            held(&record).split_whitespace().next().map(str::to_owned)
        };
        assert_eq!(verdict(&own).as_deref(), Some("ok"));
        own[3] = 50.0;
        assert_eq!(verdict(&own).as_deref(), Some("ok"));
        own[7] = 60.0;
        assert_eq!(verdict(&own).as_deref(), Some("MISSED"));
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
        assert_eq!(panels[0].limit, Some(180.0));
        assert_eq!(panels[0].bars.len(), 3);
    }
}
