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
    /// True if the difference is limited, not the ratio.
    pub is_added: bool,
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
            is_added: false,
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

    /// The same limit, of the difference to another value.
    pub const fn beyond(self, case: &'static str, metric: &'static str) -> Self {
        Self {
            of: Some((case, metric)),
            is_added: true,
            ..self
        }
    }

    /// True if the limit is met; nothing if its values were not measured.
    pub fn is_met(&self, record: &Record) -> Option<bool> {
        Some(self.value(record)? <= self.most)
    }

    /// The measured value, difference or ratio.
    fn value(&self, record: &Record) -> Option<f64> {
        let (value, base) = (record.median(self.case, self.metric)?, self.base(record)?);
        Some(if self.is_added { value - base } else { value / base })
    }

    /// Maximum of the value itself.
    fn bound(&self, record: &Record) -> Option<f64> {
        let base = self.base(record)?;
        Some(if self.is_added {
            base + self.most
        } else {
            base * self.most
        })
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
        let of = limit.of.filter(|_| !limit.is_added);
        let of = of.map_or(String::new(), |(case, _)| format!(" × {case}"));
        Some(vec![
            verdict(limit.is_met(record)?).to_owned(),
            limit.what.to_owned(),
            number(limit.value(record)?),
            format!("≤ {}{of}", number(limit.most)),
        ])
    };
    align(&limits.iter().filter_map(row).collect::<Vec<_>>(), 2)
}

/// The panel of a metric, with the lowest of the `limits` of the first of the `cases` that have it; nothing if none
/// has.
pub fn panel<S: AsRef<str>>(
    record: &Record,
    limits: &[Limit],
    cases: &[S],
    metric: &str,
    title: impl Into<String>,
) -> Option<Panel> {
    let bars = record.bars(cases, metric);
    let (first, _) = bars.first()?;
    let limits = limits
        .iter()
        .filter(|limit| limit.metric == metric && limit.case == *first);
    let limit = limits.filter_map(|limit| limit.bound(record)).reduce(f64::min);
    Some(Panel {
        title: title.into(),
        bars,
        limit,
    })
}

/// The panels of `cases`, from pairs of metric and title; without those that only one case has.
pub fn panels<S: AsRef<str>, T: Into<String>>(
    record: &Record,
    limits: &[Limit],
    cases: &[S],
    metrics: impl IntoIterator<Item = (&'static str, T)>,
) -> Vec<Panel> {
    let all = metrics
        .into_iter()
        .filter_map(|(metric, title)| panel(record, limits, cases, metric, title));
    all.filter(|panel| panel.bars.len() > 1).collect()
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
        Limit::at_most("own", "part", "what it adds", 3.0).beyond("other", "part"),
        Limit::at_most("own", "never measured", "nothing", 1.0),
    ];

    #[test]
    fn limits_are_held_or_missed() {
        let record = Record::example([
            ("own", "time", 84.0),
            ("own", "part", 41.0),
            ("own", "count", 3001.0),
            ("other", "time", 100.0),
            ("other", "part", 38.0),
        ]);
        let text = held(&record, LIMITS);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(
            lines[0].starts_with("ok ") && lines[0].ends_with("≤ 0.84 × other"),
            "{text}"
        );
        assert!(
            lines[1].starts_with("MISSED") && lines[1].contains("0.41"),
            "{text}"
        );
        assert!(lines[2].starts_with("MISSED"), "{text}");
        assert!(
            lines[3].starts_with("ok ") && lines[3].ends_with("≤ 3.00"),
            "{text}"
        );
        assert_eq!(LIMITS[3].bound(&record), Some(41.0));
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
