//! The delay before a VM is started again.

use std::time::Duration;

/// Longest delay.
const LONGEST: u64 = 300;
/// Delay after the first failure, without the random part.
const FIRST: u64 = 10;

/// The delay after this many starts in a row that have failed, as KubeVirt's VM controller has it: ten seconds times
/// the square of the number, up to a half more by `random`, and at most five minutes.
pub(super) fn delay(failures: u32, random: u64) -> Duration {
    let failures = u64::from(failures.clamp(1, 1000));
    let delay = FIRST * failures * failures;
    let delay = delay + random % (delay / 2 + 1);
    Duration::from_secs(delay.min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_up_to_five_minutes() {
        let seconds = |failures, random| delay(failures, random).as_secs();
        assert_eq!(
            [1, 2, 3, 5].map(|failures| seconds(failures, 0)),
            [10, 40, 90, 250]
        );
        assert_eq!((seconds(1, 5), seconds(1, 6)), (15, 10));
        assert_eq!((seconds(6, 0), seconds(u32::MAX, u64::MAX)), (300, 300));
    }
}
