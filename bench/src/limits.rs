//! Upper limits of values, absolute or relative to another case, and their checks.

use super::record::Record;
use super::svg::Panel;
use super::table::{align, number, verdict};

/// An upper limit of a median.
#[derive(Debug)]
pub struct Limit {
    /// Name of the case.
    pub case: &'static str,
    /// Metric of the value.
    pub metric: &'static str,
    /// Title.
    pub what: &'static str,
    /// Maximum.
    pub most: f64,
    /// The case and metric that the maximum is relative to; absolute if there is none.
    pub of: Option<(&'static str, &'static str)>,
}

impl Limit {
    /// An absolute limit.
    pub const fn at_most(case: &'static str, metric: &'static str, what: &'static str, most: f64) -> Self {
        Self {
            case,
            metric,
            what,
            most,
            of: None,
        }
    }

    /// An absolute limit of Husk's value.
    pub const fn of_husk(metric: &'static str, what: &'static str, most: f64) -> Self {
        Self::at_most("husk", metric, what, most)
    }

    /// The same limit, relative to the value of another case.
    pub const fn times(self, case: &'static str) -> Self {
        let of = Some((case, self.metric));
        Self { of, ..self }
    }

    /// The value that the limit is relative to: 1 if it is absolute.
    fn base(&self, record: &Record) -> Option<f64> {
        self.of
            .map_or(Some(1.0), |(case, metric)| record.median(case, metric))
    }
}

/// Each measured limit, and true if it is met.
pub fn held(record: &Record, limits: &[Limit]) -> String {
    let row = |limit: &Limit| {
        let value = record.median(limit.case, limit.metric)? / limit.base(record)?;
        let of = limit.of.map_or(String::new(), |(case, _)| format!(" × {case}"));
        Some(vec![
            verdict(value <= limit.most).to_owned(),
            limit.what.to_owned(),
            number(value),
            format!("≤ {}{of}", number(limit.most)),
        ])
    };
    align(&limits.iter().filter_map(row).collect::<Vec<_>>(), 2)
}

/// The panels of `cases`, from pairs of metric and title, with the lowest of the `limits` of the first case; without
/// those that only one case has.
pub fn panels<S: AsRef<str>, T: Into<String>>(
    record: &Record,
    limits: &[Limit],
    cases: &[S],
    metrics: impl IntoIterator<Item = (&'static str, T)>,
) -> Vec<Panel> {
    let panel = |(metric, title): (&str, T)| {
        let bars = record.bars(cases, metric);
        let limits = limits.iter().filter(|limit| {
            limit.metric == metric && bars.first().is_some_and(|(case, _)| case == limit.case)
        });
        let limits = limits.filter_map(|limit| Some(limit.most * limit.base(record)?));
        let limit = limits.reduce(f64::min);
        (bars.len() > 1).then(|| Panel {
            title: title.into(),
            bars,
            limit,
        })
    };
    metrics.into_iter().filter_map(panel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: &[Limit] = &[
        Limit::at_most("own", "time", "a time", 0.84).times("other"),
        Limit {
            of: Some(("other", "time")),
            ..Limit::at_most("own", "part", "a part of it", 0.4)
        },
        Limit::at_most("own", "count", "a count", 3000.0),
        Limit::at_most("own", "never measured", "nothing", 1.0),
    ];

    #[test]
    fn limits_are_held_or_missed() {
        let record = Record::example([
            ("own", "time", 84.0),
            ("own", "part", 41.0),
            ("own", "count", 3001.0),
            ("other", "time", 100.0),
        ]);
        let text = held(&record, LIMITS);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(
            lines[0].starts_with("ok ") && lines[0].ends_with("≤ 0.84 × other"),
            "{text}"
        );
        assert!(
            lines[1].starts_with("MISSED") && lines[1].contains("0.41"),
            "{text}"
        );
        assert!(lines[2].starts_with("MISSED"), "{text}");
    }

    #[test]
    fn the_lowest_limit_is_drawn_for_the_first_case() {
        let record = Record::example([("own", "time", 50.0), ("other", "time", 100.0)]);
        let drawn = |cases: &[&str]| {
            let panels = panels(&record, LIMITS, cases, [("time", "a time")]);
            panels.first().map(|panel| panel.limit)
        };
        assert_eq!(drawn(&["own", "other"]), Some(Some(84.0)));
        assert_eq!(drawn(&["other", "own"]), Some(None));
        assert_eq!(drawn(&["own"]), None);
    }
}
