//! Text and exit status for the status of a VM.

use std::time::Duration;

use husk_proto::shim::v1::{Phase, Status, Timeline};
use husk_proto::vmm::v1::ExitReason;

use crate::failure::{RUNTIME, one_line};

/// Exit status of `husk run` after a guest kernel panic.
pub(crate) const GUEST_PANIC: u8 = 10;
/// Exit status of `husk run` after a triple fault.
pub(crate) const TRIPLE_FAULT: u8 = 11;
/// Exit status of `husk run` if no kernel could be loaded.
pub(crate) const BOOT_FAILED: u8 = 12;
/// Exit status of `husk run` if the guest's watchdog ended the VM.
pub(crate) const WATCHDOG: u8 = 14;

/// Preparation of disks is mentioned only if it takes at least this long.
const NOTABLE_PREPARATION: Duration = Duration::from_secs(1);

/// A crash within this time may be the fault of the host, so `husk doctor` is suggested.
const EARLY_EXIT: Duration = Duration::from_secs(5);

/// True if the VM has ended.
pub(crate) fn is_final(status: &Status) -> bool {
    matches!(status.phase(), Phase::Succeeded | Phase::Failed)
}

/// Lines that describe a change of status.
pub(crate) fn change_lines(before: &Status, now: &Status) -> Vec<String> {
    let mut lines = Vec::new();
    if now.phase() == Phase::Running && before.phase() != Phase::Running {
        lines.push(start_summary(now));
    }
    if now.reboots > before.reboots {
        lines.push("rebooted".into());
    }
    if now.phase() == Phase::Running && before.phase() == Phase::Running && now.paused != before.paused {
        lines.push(match (now.paused, now.message.trim()) {
            (true, "") => "paused".into(),
            (true, message) => one_line(message),
            (false, _) => "resumed".into(),
        });
    }
    if is_final(now) {
        lines.push(exit_summary(now));
    }
    lines
}

fn start_summary(status: &Status) -> String {
    let paused = if status.paused { ", paused" } else { "" };
    let prepared = between(
        status,
        |timeline| timeline.monitor_started,
        |timeline| timeline.vmm_started,
    );
    let prepared = match prepared {
        Some(time) if time >= NOTABLE_PREPARATION => {
            format!(" (plus {} for disk preparation)", duration(time))
        }
        _ => String::new(),
    };
    match between(
        status,
        |timeline| timeline.vmm_started,
        |timeline| timeline.running,
    ) {
        Some(time) => format!("running after {} ms{prepared}{paused}", time.as_millis()),
        None => format!("running{paused}"),
    }
}

/// One line that describes the end of a VM.
pub(crate) fn exit_summary(status: &Status) -> String {
    let mut text = match status.message.trim() {
        "" => status.reason.clone(),
        message => one_line(message),
    };
    let ran = between(status, |timeline| timeline.running, |timeline| timeline.ended);
    if let Some(ran) = ran {
        text = format!("{text} (ran {})", duration(ran));
    }
    let suspicious = matches!(status.exit(), ExitReason::Error | ExitReason::TripleFault);
    if suspicious && ran.unwrap_or_default() < EARLY_EXIT {
        text.push_str("; `husk doctor` checks whether this host can run VMs");
    }
    text
}

/// Exit status of `husk run` for the final status of a VM.
pub(crate) fn exit_status(status: &Status) -> u8 {
    match (status.phase(), status.exit()) {
        (Phase::Succeeded, _) => 0,
        (_, ExitReason::GuestPanic) => GUEST_PANIC,
        (_, ExitReason::TripleFault) => TRIPLE_FAULT,
        (_, ExitReason::BootFailed) => BOOT_FAILED,
        (_, ExitReason::Watchdog) => WATCHDOG,
        _ => RUNTIME,
    }
}

/// Time between two events of the timeline, if both have happened.
fn between(
    status: &Status,
    from: impl Fn(&Timeline) -> u64,
    to: impl Fn(&Timeline) -> u64,
) -> Option<Duration> {
    let timeline = status.timeline.as_ref()?;
    let (from, to) = (from(timeline), to(timeline));
    if from == 0 {
        None
    } else {
        to.checked_sub(from).map(Duration::from_nanos)
    }
}

/// Formats a duration: `850 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`.
fn duration(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        seconds @ 1..60 => format!("{seconds}.{} s", time.subsec_millis() / 100),
        seconds @ 60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running() -> Status {
        let timeline = Timeline {
            vmm_started: 1_000_000_000,
            running: 1_042_000_000,
            ..Timeline::default()
        };
        Status {
            phase: Phase::Running.into(),
            timeline: Some(timeline),
            ..Status::default()
        }
    }

    fn ended(phase: Phase, exit: ExitReason, message: &str, seconds: u64) -> Status {
        let mut status = running();
        status.phase = phase.into();
        status.exit = exit.into();
        status.message = message.into();
        if let Some(timeline) = &mut status.timeline {
            timeline.ended = timeline.running + seconds * 1_000_000_000;
        }
        status
    }

    #[test]
    fn each_change_is_one_line() {
        let scheduled = Status {
            phase: Phase::Scheduled.into(),
            ..Status::default()
        };
        assert_eq!(change_lines(&scheduled, &running()), ["running after 42 ms"]);
        assert!(change_lines(&running(), &running()).is_empty());
        let paused = Status {
            paused: true,
            ..running()
        };
        assert_eq!(change_lines(&running(), &paused), ["paused"]);
        assert_eq!(change_lines(&paused, &running()), ["resumed"]);
        assert_eq!(
            change_lines(
                &running(),
                &Status {
                    reboots: 1,
                    ..running()
                }
            ),
            ["rebooted"]
        );
        let end = ended(
            Phase::Succeeded,
            ExitReason::Poweroff,
            "the guest powered off",
            65,
        );
        assert_eq!(
            change_lines(&running(), &end),
            ["the guest powered off (ran 1 min 5 s)"]
        );
    }

    #[test]
    fn a_paused_start_is_one_line() {
        let paused = Status {
            paused: true,
            ..running()
        };
        assert_eq!(
            change_lines(&Status::default(), &paused),
            ["running after 42 ms, paused"]
        );
    }

    #[test]
    fn disk_preparation_is_reported_separately() {
        let mut status = running();
        if let Some(timeline) = &mut status.timeline {
            timeline.vmm_started += 10_000_000_000;
            timeline.running += 10_000_000_000;
            timeline.monitor_started = 800_000_000;
        }
        assert_eq!(
            change_lines(&Status::default(), &status),
            ["running after 42 ms (plus 10.2 s for disk preparation)"]
        );
    }

    #[test]
    fn an_early_crash_suggests_the_doctor() {
        let early = ended(Phase::Failed, ExitReason::TripleFault, "triple fault", 1);
        assert!(exit_summary(&early).contains("husk doctor"));
        let late = ended(Phase::Failed, ExitReason::TripleFault, "triple fault", 60);
        assert!(!exit_summary(&late).contains("husk doctor"));
    }

    #[test]
    fn each_outcome_has_its_exit_status() {
        let status = |phase, exit| exit_status(&ended(phase, exit, "", 1));
        assert_eq!(status(Phase::Succeeded, ExitReason::Poweroff), 0);
        assert_eq!(status(Phase::Failed, ExitReason::Error), 1);
        assert_eq!(status(Phase::Failed, ExitReason::Poweroff), 1);
        assert_eq!(status(Phase::Failed, ExitReason::GuestPanic), 10);
        assert_eq!(status(Phase::Failed, ExitReason::TripleFault), 11);
        assert_eq!(status(Phase::Failed, ExitReason::BootFailed), 12);
        assert_eq!(status(Phase::Failed, ExitReason::Watchdog), 14);
    }

    #[test]
    fn durations_are_readable() {
        assert_eq!(duration(Duration::from_millis(850)), "850 ms");
        assert_eq!(duration(Duration::from_millis(4_250)), "4.2 s");
        assert_eq!(duration(Duration::from_secs(200)), "3 min 20 s");
        assert_eq!(duration(Duration::from_secs(7_530)), "2 h 5 min");
    }
}
