//! The status of a VM.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use husk_proto::shim::v1::{Phase, Status, Timeline};
use husk_proto::vmm::v1::event::{Event as Kind, IoError, WatchdogBite};
use husk_proto::vmm::v1::watchdog::Action;
use husk_proto::vmm::v1::{Event, ExitReason, State};
use husk_volumes::UnpackProgress;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::watch;

use super::final_status::FinalStatus;

/// The reason in the status of a VM paused by an I/O error.
pub(super) const PAUSED_IO_ERROR: &str = "PausedIOError";
/// The reason in the status of a VM paused by its watchdog.
const PAUSED_WATCHDOG: &str = "PausedWatchdog";

/// Publishes the status of a VM. Clones publish the same status.
#[derive(Debug, Clone)]
pub(super) struct StatusPublisher {
    status: watch::Sender<Status>,
}

impl StatusPublisher {
    pub(super) fn new() -> StatusPublisher {
        let timeline = Timeline {
            monitor_started: now(),
            ..Timeline::default()
        };
        let status = Status {
            phase: Phase::Scheduled.into(),
            timeline: Some(timeline),
            ..Status::default()
        };
        StatusPublisher {
            status: watch::Sender::new(status),
        }
    }

    /// Watches the status. The watch ends after the final status.
    pub(super) fn subscribe(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    pub(super) fn is_paused(&self) -> bool {
        self.status.borrow().paused
    }

    /// Publishes the progress of unpacking or copying a volume. Only the `: N %` at the end changes.
    pub(super) fn preparing(&self, doing: &str, progress: &UnpackProgress) {
        let UnpackProgress { volume, done, size } = progress;
        let percent = u128::from(*done) * 100 / u128::from(*size).max(1);
        let message = format!("{doing} volume {volume:?} ({} MiB): {percent} %", size >> 20);
        self.status.send_modify(|status| status.message = message);
    }

    pub(super) fn vmm_started(&self) {
        self.timeline(|timeline| timeline.vmm_started = now());
    }

    pub(super) fn stopping(&self) {
        self.status.send_modify(|status| status.stopping = true);
    }

    /// Updates the status with an event of the VMM.
    pub(super) fn handle_vmm_event(&self, event: &Event) {
        let when = unix_time(event.monotonic_ns);
        match &event.event {
            Some(Kind::State(state)) => match State::try_from(*state) {
                Ok(State::Created) => self.timeline(|timeline| timeline.created = when),
                Ok(State::Running) => self.runs(when, false),
                Ok(State::Paused) => self.runs(when, true),
                _ => {}
            },
            Some(Kind::Reset(_)) => self.status.send_modify(|status| {
                status.reboots = status.reboots.saturating_add(1);
                // The pause that an error announced was still due when the reset came. It does not come.
                if !status.paused {
                    status.reason.clear();
                    status.message.clear();
                }
            }),
            Some(Kind::Resets(count)) => self.status.send_modify(|status| {
                status.reboots = status.reboots.max(*count);
            }),
            Some(Kind::Warning(warning)) if warning.guest_panicked => {
                self.status.send_modify(|status| status.panics += 1);
            }
            Some(Kind::IoError(error)) => self.io_error(error),
            Some(Kind::Watchdog(bite)) => self.watchdog(bite),
            Some(Kind::Warning(_) | Kind::Exit(_) | Kind::PortOpened(_)) | None => {}
        }
    }

    pub(super) fn end(&self, final_status: FinalStatus) {
        self.status.send_modify(|status| {
            status.phase = final_status.phase.into();
            status.paused = false;
            status.stopping = false;
            status.reason = final_status.reason.into();
            status.message = final_status.message;
            status.exit = final_status.exit.into();
            status.panics += u64::from(final_status.exit == ExitReason::GuestPanic);
            status.timeline.get_or_insert_default().ended = now();
        });
    }

    /// Records an I/O error. The VMM pauses the VM next.
    fn io_error(&self, error: &IoError) {
        let IoError { disk, message } = error;
        self.status.send_modify(|status| {
            status.reason = PAUSED_IO_ERROR.into();
            status.message = format!("paused: I/O error on disk {disk:?}: {message}");
        });
    }

    /// Records that the watchdog ran out. The VMM takes the action next.
    fn watchdog(&self, bite: &WatchdogBite) {
        if bite.action() == Action::Pause {
            self.status.send_modify(|status| {
                status.reason = PAUSED_WATCHDOG.into();
                status.message = "paused: the guest's watchdog ran out".into();
            });
        }
    }

    fn runs(&self, when: u64, paused: bool) {
        self.status.send_modify(|status| {
            status.phase = Phase::Running.into();
            // A VM whose pause is told again may be paused for another reason by now: events were lost.
            let again = paused && status.paused;
            if !paused || again || ![PAUSED_IO_ERROR, PAUSED_WATCHDOG].contains(&&*status.reason) {
                status.reason.clear();
                status.message.clear();
            }
            status.paused = paused;
            let timeline = status.timeline.get_or_insert_default();
            if timeline.running == 0 && !paused {
                timeline.running = when;
            }
        });
    }

    fn timeline(&self, change: impl FnOnce(&mut Timeline)) {
        self.status
            .send_modify(|status| change(status.timeline.get_or_insert_default()));
    }
}

/// The present time in nanoseconds since 1970.
fn now() -> u64 {
    nanoseconds(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// Converts a `CLOCK_MONOTONIC` time to nanoseconds since 1970. A time in the future becomes the present.
fn unix_time(monotonic_ns: u64) -> u64 {
    let clock = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(clock.tv_sec).unwrap_or_default();
    let nanos = u32::try_from(clock.tv_nsec).unwrap_or_default();
    let age = nanoseconds(Duration::new(seconds, nanos)).saturating_sub(monotonic_ns);
    now().saturating_sub(age)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use husk_proto::vmm::v1::event::Warning;

    use super::*;

    #[test]
    fn panics_are_counted_whether_or_not_they_end_the_vm() {
        let publisher = StatusPublisher::new();
        let mut status = publisher.subscribe();
        let warning = |guest_panicked| Event {
            monotonic_ns: 0,
            event: Some(Kind::Warning(Warning {
                message: String::new(),
                guest_panicked,
            })),
        };
        publisher.handle_vmm_event(&warning(false));
        assert_eq!(status.borrow_and_update().panics, 0);
        publisher.handle_vmm_event(&warning(true));
        assert_eq!(status.borrow_and_update().panics, 1);
        let end = |exit| FinalStatus {
            phase: Phase::Failed,
            reason: "",
            message: String::new(),
            exit,
        };
        publisher.end(end(ExitReason::TripleFault));
        assert_eq!(status.borrow_and_update().panics, 1);
        publisher.end(end(ExitReason::GuestPanic));
        assert_eq!(status.borrow_and_update().panics, 2);
    }

    #[test]
    fn resets_that_were_lost_are_counted() {
        let publisher = StatusPublisher::new();
        let status = publisher.subscribe();
        let reset = || Kind::Reset(Default::default());
        let counts = [
            reset(),
            Kind::Resets(7),
            Kind::Resets(7),
            reset(),
            Kind::Resets(3),
        ]
        .map(|event| {
            publisher.handle_vmm_event(&Event {
                monotonic_ns: 0,
                event: Some(event),
            });
            status.borrow().reboots
        });
        assert_eq!(counts, [1, 7, 7, 8, 8]);
    }

    #[test]
    fn the_cause_of_a_pause_is_shown_until_the_vm_runs_again() {
        let publisher = StatusPublisher::new();
        let mut status = publisher.subscribe();
        let mut after = |event| {
            publisher.handle_vmm_event(&Event {
                monotonic_ns: 0,
                event: Some(event),
            });
            let status = status.borrow_and_update();
            (status.paused, status.reason.clone(), status.message.clone())
        };
        let state = |state: State| Kind::State(state.into());
        let error = IoError {
            disk: "data".into(),
            message: "no space".into(),
        };
        let message = "paused: I/O error on disk \"data\": no space";
        let said = (true, PAUSED_IO_ERROR.to_owned(), message.to_owned());
        let nothing = |paused| (paused, String::new(), String::new());
        assert_eq!(after(state(State::Running)), nothing(false));
        assert_eq!(after(state(State::Paused)), nothing(true));
        assert_eq!(after(state(State::Running)), nothing(false));
        after(Kind::IoError(error.clone()));
        assert_eq!(after(state(State::Paused)), said);
        assert_eq!(after(state(State::Paused)), nothing(true));
        assert_eq!(after(Kind::IoError(error.clone())), said);
        let reset = || Kind::Reset(Default::default());
        assert_eq!(after(reset()), said);
        assert_eq!(after(state(State::Running)), nothing(false));
        after(Kind::IoError(error));
        assert_eq!(after(reset()), nothing(false));
        let bite = |action: Action| {
            Kind::Watchdog(WatchdogBite {
                action: action.into(),
            })
        };
        assert_eq!(after(bite(Action::Shutdown)), nothing(false));
        after(bite(Action::Pause));
        let said = (
            true,
            PAUSED_WATCHDOG.to_owned(),
            "paused: the guest's watchdog ran out".to_owned(),
        );
        assert_eq!(after(state(State::Paused)), said);
        assert_eq!(after(state(State::Running)), nothing(false));
    }
}
