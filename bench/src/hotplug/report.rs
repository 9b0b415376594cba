//! Report of the measured values.

use super::case::Case;
use crate::cases::{BenchCase, names};
use crate::figures::scatter;
use crate::limits::{Limit, panels};
use crate::record::Record;
use crate::stats::{summary, upper_bound};
use crate::svg::Panel;
use crate::table::{align, join, verdict};

/// Metrics and their titles.
const LINES: [(&str, &str); 5] = [
    ("hotplug_ms", "add → event, ms"),
    ("hotplug_with_image_ms", "  with QEMU's blockdev-add, ms"),
    ("hotplug_answer_ms", "  add → answer, ms"),
    ("unplug_ms", "remove → event, ms"),
    ("unplug_free_ms", "remove → image is free, ms"),
];

/// Maximum ratio to QEMU's time.
const LIMIT: Limit = Limit::of_husk("hotplug_ms", "add → event", 1.0).times("qemu-q35");

/// Machine and versions of the measurement, in one line.
pub fn setting(record: &Record) -> String {
    let additions = record.setting("additions");
    format!(
        "{}; {additions} additions to each guest; {}",
        record.guest(),
        record.machine()
    )
}

/// The table, and the result of the limit.
pub fn text(record: &Record) -> String {
    join([
        setting(record),
        scatter(record, &names::<Case>(), LINES),
        held(record).unwrap_or_default(),
    ])
}

/// True if Husk takes no longer. Medians of rounds are compared: additions to one guest are not independent.
fn held(record: &Record) -> Option<String> {
    let (husk, other) = (Case::Husk.name(), Case::Q35.name());
    let ratios = record.ratios(husk, other, LIMIT.metric);
    let ratio = summary(&ratios)?.median;
    let surely = match upper_bound(&ratios) {
        Some(high) => format!("with 95 % ≤ {high:.2}"),
        None => "too few rounds to say how surely".to_owned(),
    };
    let row = vec![
        verdict(ratio <= LIMIT.most).to_owned(),
        husk.to_owned(),
        LIMIT.what.to_owned(),
        format!("{ratio:.2}"),
        format!("≤ {} × {other}, {surely}", LIMIT.most),
    ];
    Some(align(&[row], 3))
}

/// The panels of the plot.
pub fn plot(record: &Record) -> Vec<Panel> {
    let lines = LINES.map(|(metric, label)| (metric, label.trim()));
    panels(record, &[LIMIT], &names::<Case>(), lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::measurements;

    /// A round is a list of additions.
    fn record(values: &[(Case, &[&[f64]])]) -> Record {
        let mut record = Record::default();
        for (case, rounds) in values {
            for (round, values) in (1..).zip(rounds.iter()) {
                let values = values.iter().map(|value| ("hotplug_ms", "ms", *value));
                let values = measurements("hotplug", case.name(), round, values);
                record.measurements.extend(values);
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
        let ratios = record.ratios("husk", "qemu-q35", "hotplug_ms");
        assert_eq!(ratios, [0.9, 0.95]);
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
