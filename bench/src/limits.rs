//! Upper limits of values, absolute or relative to another case, and their checks.

use super::record::Record;
use super::stats::summary;
use super::svg::Panel;
use super::table::{align, number};

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
    fn value(&self, record: &Record) -> Option<f64> {
        let own = summary(&record.values(self.case, self.metric))?.median;
        match self.of {
            None => Some(own),
            Some((case, metric)) => Some(own / summary(&record.values(case, metric))?.median),
        }
    }

    fn absolute(&self, record: &Record) -> Option<f64> {
        match self.of {
            None => Some(self.most),
            Some((case, metric)) => Some(self.most * summary(&record.values(case, metric))?.median),
        }
    }
}

/// Each measured limit, and true if it is met.
pub fn held(record: &Record, limits: &[Limit]) -> String {
    let mut rows = Vec::new();
    for limit in limits {
        let Some(value) = limit.value(record) else {
            continue;
        };
        let verdict = if value <= limit.most { "ok" } else { "MISSED" };
        let of = limit.of.map_or(String::new(), |(case, _)| format!(" × {case}"));
        rows.push(vec![
            verdict.to_owned(),
            limit.what.to_owned(),
            number(value),
            format!("≤ {}{of}", number(limit.most)),
        ]);
    }
    align(&rows, 2)
}

/// The panel of a metric of `cases`, with the lowest of the `limits` of the first; nothing if only one case has it.
pub fn panel<S: AsRef<str>>(
    record: &Record,
    limits: &[Limit],
    cases: &[S],
    metric: &str,
    title: &str,
) -> Option<Panel> {
    let sum = |case: &S| {
        let case = case.as_ref();
        Some((case.to_owned(), summary(&record.values(case, metric))?))
    };
    let bars: Vec<_> = cases.iter().filter_map(sum).collect();
    let of_first =
        |limit: &&Limit| limit.metric == metric && bars.first().is_some_and(|(case, _)| case == limit.case);
    let limit = limits.iter().filter(of_first);
    let limit = limit.filter_map(|limit| limit.absolute(record)).reduce(f64::min);
    (bars.len() > 1).then(|| Panel {
        title: title.to_owned(),
        bars,
        limit,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Measurement;

    fn record(values: &[(&str, &str, f64)]) -> Record {
        let mut record = Record::default();
        for (case, metric, value) in values {
            record.measurements.push(Measurement {
                bench: "any".into(),
                case: (*case).into(),
                metric: (*metric).into(),
                unit: "ms".into(),
                value: *value,
                run: 1,
            });
        }
        record
    }

    const LIMITS: &[Limit] = &[
        Limit {
            case: "own",
            metric: "time",
            what: "a time",
            most: 0.84,
            of: Some(("other", "time")),
        },
        Limit {
            case: "own",
            metric: "part",
            what: "a part of it",
            most: 0.4,
            of: Some(("other", "time")),
        },
        Limit {
            case: "own",
            metric: "count",
            what: "a count",
            most: 3000.0,
            of: None,
        },
        Limit {
            case: "own",
            metric: "never measured",
            what: "nothing",
            most: 1.0,
            of: None,
        },
    ];

    #[test]
    fn limits_are_held_or_missed() {
        let record = record(&[
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
        let record = record(&[("own", "time", 50.0), ("other", "time", 100.0)]);
        let drawn = |cases: &[&str]| Some(panel(&record, LIMITS, cases, "time", "a time")?.limit);
        assert_eq!(drawn(&["own", "other"]), Some(Some(84.0)));
        assert_eq!(drawn(&["other", "own"]), Some(None));
        assert_eq!(drawn(&["own"]), None);
    }
}
