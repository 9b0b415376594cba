//! Medians and their scatter.

use statrs::distribution::{Binomial, DiscreteCDF};
use statrs::statistics::{Data, OrderStatistics};

/// Summary of several values of one metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Median.
    pub median: f64,
    /// 10th percentile, median-unbiased: of six values or fewer the least.
    pub p10: f64,
    /// 90th percentile likewise.
    pub p90: f64,
    /// Number of values.
    pub count: usize,
}

/// Summarises `values`; nothing if there are none.
pub fn summary(values: &[f64]) -> Option<Summary> {
    if values.is_empty() {
        return None;
    }
    let mut data = Data::new(values.to_vec());
    Some(Summary {
        median: data.quantile(0.5),
        p10: data.quantile(0.1),
        p90: data.quantile(0.9),
        count: values.len(),
    })
}

/// Lower bound of the median of the distribution that `values` sample, with 95 % confidence: one of the values, by the
/// sign test. Nothing if there are too few values.
pub fn lower_bound(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    // With n values, all of the k least lie below the median with the probability of at most k - 1 heads in n coin
    // tosses.
    let tosses = Binomial::new(0.5, sorted.len() as u64).ok()?;
    let below = (0..)
        .zip(&sorted)
        .take_while(|(heads, _)| tosses.cdf(*heads) <= 0.05);
    below.last().map(|(_, bound)| *bound)
}

/// Upper bound of the same median.
pub fn upper_bound(values: &[f64]) -> Option<f64> {
    let mirrored: Vec<f64> = values.iter().map(|value| -value).collect();
    lower_bound(&mirrored).map(|bound| -bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_neighbours() {
        let values: Vec<f64> = (0..=10).rev().map(f64::from).collect();
        let sum = summary(&values).expect("values");
        assert_eq!((sum.median, sum.count), (5.0, 11));
        let near = |value: f64, wanted: f64| (value - wanted).abs() < 1e-3;
        assert!(near(sum.p10, 0.4667) && near(sum.p90, 9.5333), "{sum:?}");
        assert_eq!(summary(&[1.0, 2.0]).expect("values").median, 1.5);
        assert_eq!(summary(&[]), None);
    }

    #[test]
    fn a_lower_bound_needs_values() {
        let bound = |count: u32| lower_bound(&(1..=count).map(f64::from).collect::<Vec<_>>());
        // From tables of the sign test: 5 values are the fewest that give a bound.
        assert_eq!(
            [0, 1, 4, 5, 7, 8, 10, 11, 20].map(bound),
            [
                None,
                None,
                None,
                Some(1.0),
                Some(1.0),
                Some(2.0),
                Some(2.0),
                Some(3.0),
                Some(6.0)
            ]
        );
    }

    #[test]
    fn an_upper_bound_is_as_far_from_its_side() {
        let values: Vec<f64> = (1..=8).map(f64::from).collect();
        assert_eq!(
            (lower_bound(&values), upper_bound(&values)),
            (Some(2.0), Some(7.0))
        );
        assert_eq!(upper_bound(&values[..4]), None);
    }
}
