//! The rate of log lines that a guest or its VMM can cause.

use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

const WINDOW: Duration = Duration::from_secs(5);

/// Lets a number of lines pass in each 5 s.
#[derive(Debug)]
pub(crate) struct LogRateLimiter {
    /// The lines' source, for the line with the number of suppressed lines.
    source: &'static str,
    /// Lines that may pass in each window.
    most: u32,
    begun: Instant,
    lines: u32,
}

impl LogRateLimiter {
    pub(crate) fn new(source: &'static str, most: u32) -> LogRateLimiter {
        LogRateLimiter {
            source,
            most,
            begun: Instant::now(),
            lines: 0,
        }
    }

    /// Counts a line. Returns false if it must not be logged.
    pub(crate) fn allow(&mut self) -> bool {
        if self.begun.elapsed() > WINDOW {
            if self.lines > self.most {
                warn!(
                    lines = self.lines - self.most,
                    "{}: lines were suppressed", self.source
                );
            }
            (self.begun, self.lines) = (Instant::now(), 0);
        }
        self.lines = self.lines.saturating_add(1);
        self.lines <= self.most
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lines_beyond_the_limit_are_suppressed_in_each_window() {
        let mut limit = LogRateLimiter::new("a log", 3);
        let mut flood = || (0..100).filter(|_| limit.allow()).count();
        assert_eq!(flood(), 3);
        assert_eq!(flood(), 0);
        sleep(WINDOW + Duration::from_millis(1)).await;
        assert_eq!(flood(), 3);
    }
}
