//! Lower limits of rates relative to another case, and their checks.

use super::record::{Measurement, Record};
use super::stats::{lower_bound, summary};
use super::table::align;

/// A target for a rate.
#[derive(Debug)]
pub struct Target {
    /// Name of the case.
    pub case: &'static str,
    /// Metric of the rate.
    pub metric: String,
    /// Title.
    pub title: &'static str,
    /// Minimum of the median of pairs.
    pub least: f64,
    /// The case it is compared with.
    pub of: &'static str,
    /// Minimum of the lower bound of the median of pairs.
    pub bound: Option<f64>,
}

/// Each measured target, and true if it is met.
pub fn check(record: &Record, targets: &[Target]) -> String {
    let mut rows = Vec::new();
    for target in targets {
        let pairs = target.pairs(record);
        let Some(ratio) = summary(&pairs) else {
            continue;
        };
        let low = lower_bound(&pairs);
        let (wanted, bounded) = match (target.bound, low) {
            (None, _) => (String::new(), true),
            (Some(bound), None) => (format!(", with 95 % ≥ {bound}: too few rounds to say"), true),
            (Some(bound), Some(low)) => (format!(", with 95 % ≥ {bound}: {low:.2}"), low >= bound),
        };
        let good = ratio.median >= target.least && bounded;
        rows.push(vec![
            if good { "ok" } else { "MISSED" }.to_owned(),
            target.case.to_owned(),
            target.title.to_owned(),
            format!("{:.2}", ratio.median),
            format!("≥ {} × {}{wanted}", target.least, target.of),
        ]);
    }
    align(&rows, 3)
}

/// The highest value that `targets` require of `case`.
pub fn limit(record: &Record, targets: &[Target], case: &str, metric: &str) -> Option<f64> {
    let of = targets
        .iter()
        .filter(|target| target.case == case && target.metric == metric);
    let least = |target: &Target| Some(target.least * summary(&record.values(target.of, metric))?.median);
    of.filter_map(least).reduce(f64::max)
}

impl Target {
    /// Ratio of the case's rate to the other's, in each round that has both.
    fn pairs(&self, record: &Record) -> Vec<f64> {
        let of = |case: &'static str| {
            let values = record.measurements.iter();
            values.filter(move |m| m.case == case && m.metric == self.metric)
        };
        let pair = |own: &Measurement| {
            let other = of(self.of).find(|other| other.run == own.run)?;
            Some(own.value / other.value)
        };
        of(self.case).filter_map(pair).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(own: &[f64], other: &[f64]) -> Record {
        let mut record = Record::default();
        for (case, values) in [("own", own), ("other", other)] {
            for (run, value) in (1..).zip(values) {
                record.measurements.push(Measurement {
                    bench: "any".into(),
                    case: case.into(),
                    metric: "rate".into(),
                    unit: "1/s".into(),
                    value: *value,
                    run,
                });
            }
        }
        record
    }

    fn target(least: f64, bound: Option<f64>) -> Target {
        Target {
            case: "own",
            metric: "rate".into(),
            title: "a rate",
            least,
            of: "other",
            bound,
        }
    }

    #[test]
    fn figures_are_held_by_pairs_of_the_same_round() {
        // The machine was twice as fast in the second round; the ratio in each pair is the same.
        let record = record(&[130.0, 260.0, 132.0], &[100.0, 200.0, 100.0]);
        let text = check(&record, &[target(1.4, None), target(1.2, None)]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].starts_with("MISSED") && lines[0].contains("1.30"),
            "{text}"
        );
        assert!(lines[1].starts_with("ok "), "{text}");
        assert_eq!(
            limit(&record, &[target(1.4, None), target(1.2, None)], "own", "rate"),
            Some(140.0)
        );
        assert_eq!(limit(&record, &[target(1.4, None)], "other", "rate"), None);
    }

    #[test]
    fn unmeasured_targets_are_not_judged() {
        assert_eq!(check(&record(&[1.0], &[]), &[target(1.0, None)]), "");
    }

    #[test]
    fn a_good_median_is_not_enough_where_a_bound_is_asked_for() {
        let mut own = [100.0; 10];
        let verdict = |own: &[f64]| {
            let text = check(&record(own, &[100.0; 10]), &[target(0.97, Some(0.93))]);
            text.split_whitespace().next().map(str::to_owned)
        };
        assert_eq!(verdict(&own).as_deref(), Some("ok"));
        own[3] = 50.0;
        assert_eq!(verdict(&own).as_deref(), Some("ok"));
        own[7] = 60.0;
        assert_eq!(verdict(&own).as_deref(), Some("MISSED"));
    }
}
