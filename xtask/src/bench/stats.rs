//! Medians and the scatter around them.

/// Some values of one thing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// The middle one.
    pub median: f64,
    /// One in ten is less.
    pub p10: f64,
    /// One in ten is more.
    pub p90: f64,
    /// How many there were.
    pub count: usize,
}

/// Sums `values` up; nothing if there are none.
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

/// Between neighbours, linear.
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
}
