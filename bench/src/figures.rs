//! Tables of medians with their ratios. Each has a row for each measured metric and a column for each case.

use super::record::Record;
use super::stats::Summary;
use super::table::{headed, number};

/// Cell of a case that was not measured.
const NONE: &str = "–";

/// A table of medians, from pairs of metric and label. After each stands its ratio to that of the case in `base`.
pub fn medians<M: AsRef<str>, L: Into<String>>(
    record: &Record,
    head: &str,
    cases: &[&'static str],
    base: impl Fn(&str) -> Option<&'static str>,
    metrics: impl IntoIterator<Item = (M, L)>,
) -> String {
    let row = |(metric, label): (M, L)| {
        let median = |case: &str| record.median(case, metric.as_ref());
        let cell = |case: &&str| match (median(case), base(case).and_then(median)) {
            (None, _) => NONE.to_owned(),
            (Some(value), Some(base)) => format!("{} ({:.2})", number(value), value / base),
            (Some(value), None) => number(value),
        };
        let is_measured = cases.iter().any(|case| median(case).is_some());
        is_measured.then(|| labelled(label, cases.iter().map(cell)))
    };
    let names = cases.iter().map(|case| (*case).to_owned());
    headed(labelled(head, names), metrics.into_iter().filter_map(row))
}

/// A table of medians and their scatter, from pairs of metric and label, and of the ratios of the first case's medians
/// to the others'.
pub fn scatter<S: AsRef<str>>(
    record: &Record,
    cases: &[S],
    metrics: impl IntoIterator<Item = (&'static str, &'static str)>,
) -> String {
    let names = || cases.iter().map(S::as_ref);
    let row = |(metric, label): (&str, &'static str)| {
        let sums: Vec<_> = names().map(|case| record.summary(case, metric)).collect();
        let cells = sums.iter().map(|sum| sum.map_or(NONE.to_owned(), scattered));
        let ratios = sums[1..].iter().rev().map(|other| match (sums[0], other) {
            (Some(first), Some(other)) => format!("{:.2}", first.median / other.median),
            _ => String::new(),
        });
        let is_measured = sums.iter().any(Option::is_some);
        is_measured.then(|| labelled(label, cells.chain(ratios)))
    };
    let ratios = names().skip(1).rev().map(|case| format!("÷ {case}"));
    let head = labelled("median (p10 … p90)", names().map(str::to_owned).chain(ratios));
    headed(head, metrics.into_iter().filter_map(row))
}

fn labelled(label: impl Into<String>, cells: impl Iterator<Item = String>) -> Vec<String> {
    std::iter::once(label.into()).chain(cells).collect()
}

fn scattered(sum: Summary) -> String {
    let [median, p10, p90] = [sum.median, sum.p10, sum.p90].map(number);
    match sum.count {
        1 => median,
        _ => format!("{median} ({p10} … {p90})"),
    }
}
