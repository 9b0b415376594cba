//! Logs the events of a VMM. A guest can cause some of them as often as it likes, so the rate is limited.

use husk_proto::vmm::v1::Event;
use husk_proto::vmm::v1::event::{Event as Kind, IoError};
use tracing::{info, warn};

use crate::log_rate_limiter::LogRateLimiter;

/// Lines in each 5 s.
const LINES: u32 = 20;

#[derive(Debug)]
pub(super) struct EventLog {
    limit: LogRateLimiter,
}

impl EventLog {
    pub(super) fn new() -> EventLog {
        EventLog {
            limit: LogRateLimiter::new("the log of the VMM's events", LINES),
        }
    }

    pub(super) fn log(&mut self, event: &Event) {
        match &event.event {
            Some(Kind::Reset(reset)) if self.limit.allow() => {
                info!(cause = reset.cause, "the guest rebooted");
            }
            Some(Kind::Warning(warning)) if self.limit.allow() => {
                warn!(message = warning.message, "the VMM warns");
            }
            Some(Kind::IoError(IoError { disk, message })) if self.limit.allow() => {
                warn!(disk, message, "I/O error");
            }
            Some(Kind::Watchdog(bite)) if self.limit.allow() => {
                warn!(
                    action = bite.action().as_str_name(),
                    "the guest's watchdog ran out"
                );
            }
            _ => {}
        }
    }
}
