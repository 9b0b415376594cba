//! Report of the measured values.

use super::case::Case;
use crate::record::Record;
use crate::stats::{summary, upper_bound};
use crate::svg::Panel;
use crate::table::{align, number};
use std::collections::BTreeSet;

/// Metrics and their titles.
const LINES: &[(&str, &str)] = &[
    ("hotplug_ms", "add → event, ms"),
    ("hotplug_with_image_ms", "  with QEMU's blockdev-add, ms"),
    ("hotplug_answer_ms", "  add → answer, ms"),
    ("unplug_ms", "remove → event, ms"),
    ("unplug_free_ms", "remove → image is free, ms"),
];

/// The metric with a limit, and its maximum ratio to the other VMM's.
const HELD: (&str, &str, f64) = ("hotplug_ms", "add → event", 1.0);

/// Machine and versions of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    let of = |name| record.setting(name);
    format!(
        "{}, {} vCPU, {} MiB; {} additions to each guest; {}",
        of("guest"),
        of("vcpus"),
        of("memory_mib"),
        of("additions"),
        record.machine(),
    )
}

/// The table, and the result of the limit.
pub fn text(record: &Record) -> String {
    let mut parts = vec![setting(record), figures(record), held(record).unwrap_or_default()];
    parts.retain(|part| !part.is_empty());
    parts.join("\n\n")
}

/// Medians, scatter and the ratios of Husk's medians to the other's.
fn figures(record: &Record) -> String {
    let mut rows = vec![vec![
        "median (p10 … p90)".to_owned(),
        Case::Husk.name().to_owned(),
        Case::Q35.name().to_owned(),
        format!("÷ {}", Case::Q35.name()),
    ]];
    for (metric, label) in LINES {
        let sums = Case::ALL.map(|case| summary(&record.values(case.name(), metric)));
        let mut row = vec![(*label).to_owned()];
        row.extend(sums.map(|sum| {
            sum.map_or("–".to_owned(), |sum| {
                let [median, p10, p90] = [sum.median, sum.p10, sum.p90].map(number);
                format!("{median} ({p10} … {p90})")
            })
        }));
        if let [Some(husk), Some(other)] = sums {
            row.push(format!("{:.2}", husk.median / other.median));
        }
        rows.push(row);
    }
    if rows.iter().any(|row| row.len() == 4 && row[1] != "–") {
        align(&rows, 1)
    } else {
        String::new()
    }
}

/// True if Husk takes no longer. Medians of rounds are compared: additions to one guest are not independent.
fn held(record: &Record) -> Option<String> {
    let (metric, what, limit) = HELD;
    let ratios = ratios(record, metric);
    let ratio = summary(&ratios)?.median;
    let surely = match upper_bound(&ratios) {
        Some(high) => format!("with 95 % ≤ {high:.2}"),
        None => "too few rounds to say how surely".to_owned(),
    };
    Some(align(
        &[vec![
            if ratio <= limit { "ok" } else { "MISSED" }.to_owned(),
            Case::Husk.name().to_owned(),
            what.to_owned(),
            format!("{ratio:.2}"),
            format!("≤ {limit} × {}, {surely}", Case::Q35.name()),
        ]],
        3,
    ))
}

/// Ratio of Husk's median to the other's in each round that has both.
fn ratios(record: &Record, metric: &str) -> Vec<f64> {
    let runs: BTreeSet<u32> = record.measurements.iter().map(|m| m.run).collect();
    let median = |case: Case, run: u32| {
        let of = record.measurements.iter().filter(|m| m.case == case.name());
        let values = of.filter(|m| m.metric == metric && m.run == run);
        Some(summary(&values.map(|m| m.value).collect::<Vec<_>>())?.median)
    };
    let ratio = |run: u32| Some(median(Case::Husk, run)? / median(Case::Q35, run)?);
    runs.into_iter().filter_map(ratio).collect()
}

/// The panels of the plot.
pub fn plot(record: &Record) -> Vec<Panel> {
    let panel = |(metric, label): &(&str, &str)| {
        let sum = |case: Case| summary(&record.values(case.name(), metric));
        let bar = |case: Case| Some((case.name().to_owned(), sum(case)?));
        let bars: Vec<_> = Case::ALL.into_iter().filter_map(bar).collect();
        let limit = sum(Case::Q35).filter(|_| *metric == HELD.0);
        (bars.len() == Case::ALL.len()).then(|| Panel {
            title: label.trim().to_owned(),
            bars,
            limit: limit.map(|other| other.median * HELD.2),
        })
    };
    LINES.iter().filter_map(panel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Measurement;

    /// A round is a list of additions.
    fn record(values: &[(Case, &[&[f64]])]) -> Record {
        let mut record = Record::default();
        for (case, rounds) in values {
            for (run, values) in (1..).zip(rounds.iter()) {
                record.measurements.extend(values.iter().map(|value| Measurement {
                    bench: "hotplug".into(),
                    case: case.name().into(),
                    metric: "hotplug_ms".into(),
                    unit: "ms".into(),
                    value: *value,
                    run,
                }));
            }
        }
        record
    }

    #[test]
    fn rounds_are_compared_by_their_medians() {
        // The machine was slower in the second round, and one addition was an outlier.
        let record = record(&[
            (Case::Husk, &[&[8.0, 9.0, 90.0], &[20.0, 18.0]]),
            (Case::Q35, &[&[10.0, 10.0, 10.0], &[20.0]]),
        ]);
        assert_eq!(ratios(&record, "hotplug_ms"), [0.9, 0.95]);
        let text = text(&record);
        let last = text.lines().last().expect("a bar");
        assert!(
            last.starts_with("ok ") && last.contains("≤ 1 × qemu-q35"),
            "{text}"
        );
        assert!(last.contains("too few rounds"), "{text}");
        let row = text.lines().find(|line| line.starts_with("add → event, ms"));
        assert!(row.is_some_and(|row| row.ends_with("1.80")), "{text}");
        assert_eq!(plot(&record)[0].limit, Some(10.0));
    }

    #[test]
    fn a_missed_target_is_reported_with_its_bound() {
        let record = record(&[
            (Case::Husk, &[&[11.0], &[12.0], &[13.0], &[14.0], &[15.0]]),
            (Case::Q35, &[&[10.0] as &[f64]; 5]),
        ]);
        let text = held(&record).expect("a bar");
        assert!(text.starts_with("MISSED") && text.contains("1.30"), "{text}");
        assert!(text.ends_with("with 95 % ≤ 1.50"), "{text}");
        assert_eq!(held(&Record::default()), None);
    }
}
