//! Tables of medians with their ratios.

use super::record::Record;
use super::stats::summary;
use super::table::{align, number};

/// A table of medians: a row for each measured pair of label and metric, a column for each case. After each median
/// stands its ratio to that of the case in `base`.
pub fn medians(
    record: &Record,
    head: &str,
    cases: &[&'static str],
    base: impl Fn(&str) -> Option<&'static str>,
    metrics: impl IntoIterator<Item = (String, String)>,
) -> String {
    let mut first = vec![head.to_owned()];
    first.extend(cases.iter().map(|case| (*case).to_owned()));
    let mut rows = vec![first];
    for (label, metric) in metrics {
        let median = |case: &str| Some(summary(&record.values(case, &metric))?.median);
        if cases.iter().all(|case| median(case).is_none()) {
            continue;
        }
        let mut row = vec![label];
        row.extend(
            cases
                .iter()
                .map(|case| match (median(case), base(case).and_then(median)) {
                    (None, _) => "–".to_owned(),
                    (Some(value), Some(base)) => format!("{} ({:.2})", number(value), value / base),
                    (Some(value), None) => number(value),
                }),
        );
        rows.push(row);
    }
    if rows.len() == 1 {
        String::new()
    } else {
        align(&rows, 1)
    }
}
