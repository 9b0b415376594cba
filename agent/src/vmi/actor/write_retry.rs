//! The time of the next write of a status after a failed one.

use std::time::Duration;

use tokio::time::Instant;

/// Time until the second write, and the longest time between two.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// The failed writes of a status since the last that succeeded.
#[derive(Debug, Default)]
pub(super) struct WriteRetry {
    /// Error of the last one.
    error: Option<String>,
    /// Time between the last one and the next, and when that is over.
    pause: Option<(Duration, Instant)>,
}

impl WriteRetry {
    /// Time for which no status is to be written.
    pub(super) fn rest(&self) -> Option<Duration> {
        let (_, end) = self.pause?;
        end.checked_duration_since(Instant::now())
    }

    pub(super) fn succeeded(&mut self) {
        *self = WriteRetry::default();
    }

    /// Records a failed write. The time until the next one doubles each time if the API server has `refused` it; a
    /// server that cannot be reached is there again soon. Returns that time, and true if the error is another than the
    /// last.
    pub(super) fn failed(&mut self, error: &str, refused: bool) -> (Duration, bool) {
        let pause = match self.pause {
            Some((last, _)) if refused => (last * 2).min(LONGEST),
            _ => FIRST,
        };
        self.pause = Some((pause, Instant::now() + pause));
        let is_new = self.error.as_deref() != Some(error);
        self.error = Some(error.to_owned());
        (pause, is_new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn refused_writes_become_rare() {
        let mut retry = WriteRetry::default();
        assert_eq!(retry.rest(), None);
        let pauses: Vec<_> = (0..7)
            .map(|_| retry.failed("refused", true).0.as_secs())
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(retry.rest(), Some(LONGEST));
        advance(LONGEST + Duration::from_millis(1)).await;
        assert_eq!(retry.rest(), None);
        assert_eq!(retry.failed("no route", false), (FIRST, true));
        assert_eq!(retry.failed("no route", false), (FIRST, false));
        retry.succeeded();
        assert_eq!(retry.failed("no route", true), (FIRST, true));
    }
}
