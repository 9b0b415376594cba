//! Lower limits of rates relative to another case, and their checks.

use super::record::Record;
use super::stats::{lower_bound, summary};
use super::svg::Panel;
use super::table::{align, verdict};

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
        let pairs = record.ratios(target.case, target.of, &target.metric);
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
            verdict(good).to_owned(),
            target.case.to_owned(),
            target.title.to_owned(),
            format!("{:.2}", ratio.median),
            format!("≥ {} × {}{wanted}", target.least, target.of),
        ]);
    }
    align(&rows, 3)
}

/// The panels of `cases`, from pairs of metric and title. The line is drawn in the first row.
pub fn panels(
    record: &Record,
    targets: &[Target],
    cases: &[&'static str],
    metrics: impl IntoIterator<Item = (String, String)>,
) -> Vec<Panel> {
    let panel = |(metric, title): (String, String)| {
        let bars = record.bars(cases, &metric);
        let (first, _) = bars.first()?;
        Some(Panel {
            title,
            limit: limit(record, targets, first, &metric),
            bars,
        })
    };
    metrics.into_iter().filter_map(panel).collect()
}

/// The highest value that `targets` require of `case`.
fn limit(record: &Record, targets: &[Target], case: &str, metric: &str) -> Option<f64> {
    let of = targets
        .iter()
        .filter(|target| target.case == case && target.metric == metric);
    let least = |target: &Target| Some(target.least * record.median(target.of, metric)?);
    of.filter_map(least).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(own: &[f64], other: &[f64]) -> Record {
        let own = own.iter().map(|value| ("own", "rate", *value));
        let other = other.iter().map(|value| ("other", "rate", *value));
        Record::example(own.chain(other))
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
