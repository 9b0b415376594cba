//! Medians and their scatter.

/// Summary of several values of one metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Median.
    pub median: f64,
    /// 10th percentile.
    pub p10: f64,
    /// 90th percentile.
    pub p90: f64,
    /// Number of values.
    pub count: usize,
}

/// Summarises `values`; nothing if there are none.
pub fn summary(values: &[f64]) -> Option<Summary> {
    if values.is_empty() {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some(Summary {
        median: quantile(&sorted, 0.5),
        p10: quantile(&sorted, 0.1),
        p90: quantile(&sorted, 0.9),
        count: sorted.len(),
    })
}

/// Lower bound of the median of the distribution that `values` sample, with 95 % confidence: one of the values, by the
/// sign test. Nothing if there are too few values.
pub fn lower_bound(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    // With n values, all of the k least lie below the median with the probability of at most k - 1 heads in n coin
    // tosses.
    let n = i32::try_from(sorted.len()).ok()?;
    let mut chance = 0.5_f64.powi(n);
    let (mut below, mut k) = (chance, 0);
    while below <= 0.05 && k < n {
        k += 1;
        chance *= f64::from(n - k + 1) / f64::from(k);
        below += chance;
    }
    sorted.get(usize::try_from(k).ok()?.checked_sub(1)?).copied()
}

/// Upper bound of the same median.
pub fn upper_bound(values: &[f64]) -> Option<f64> {
    let mirrored: Vec<f64> = values.iter().map(|value| -value).collect();
    lower_bound(&mirrored).map(|bound| -bound)
}

/// Linear interpolation between neighbouring values.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let place = q * (sorted.len() - 1) as f64;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_neighbours() {
        let values: Vec<f64> = (0..=10).rev().map(f64::from).collect();
        let sum = summary(&values).expect("values");
        assert_eq!((sum.p10, sum.median, sum.p90, sum.count), (1.0, 5.0, 9.0, 11));
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
