//! Logs the events of a VMM. A guest can cause some of them as often as it likes, so the rate is limited.

use husk_proto::vmm::v1::Event;
use husk_proto::vmm::v1::event::{Event as Kind, IoError};
use tracing::{info, warn};

use crate::log_limit::LogLimit;

/// Lines in each 5 s.
const LINES: u32 = 20;

#[derive(Debug)]
pub(super) struct EventLog {
    limit: LogLimit,
}

impl EventLog {
    pub(super) fn new() -> EventLog {
        EventLog {
            limit: LogLimit::new("the log of the VMM's events", LINES),
        }
    }

    pub(super) fn log(&mut self, event: &Event) {
        match &event.event {
            Some(Kind::Reset(reset)) if self.limit.passes() => {
                info!(cause = reset.cause, "the guest rebooted");
            }
            Some(Kind::Warning(warning)) if self.limit.passes() => {
                warn!(message = warning.message, "the VMM warns");
            }
            Some(Kind::IoError(IoError { disk, message })) if self.limit.passes() => {
                warn!(disk, message, "I/O error");
            }
            Some(Kind::Watchdog(bite)) if self.limit.passes() => {
                warn!(
                    action = bite.action().as_str_name(),
                    "the guest's watchdog ran out"
                );
            }
            _ => {}
        }
    }
}
