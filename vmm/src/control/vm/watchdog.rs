//! The action of a watchdog whose timer has run out.

use std::time::{Duration, Instant};

use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::watchdog::Action as WatchdogAction;
use husk_proto::vmm::v1::{self as pb, ExitReason, PauseReason};

use super::{Vm, VmExit};

/// Time after a press of the power button in which the watchdog has no effect. A guest can let the timer run out
/// hundreds of times a second. The monitor would fall behind with the events, and lose its stream.
const PRESS_PAUSE: Duration = Duration::from_secs(1);

impl Vm {
    /// Carries out the watchdog's action if the guest has let the timer run out.
    pub(super) fn watchdog_due(&mut self) -> Option<VmExit> {
        let running = self.running.as_ref()?;
        let action = running.watchdog.filter(|_| running.machine.watchdog_alarm())?;
        if self.deferred_reset.is_some() {
            return None;
        }
        if action == WatchdogAction::Shutdown {
            let now = Instant::now();
            if self.watchdog_pressed.is_some_and(|at| now < at + PRESS_PAUSE) {
                return None;
            }
            self.watchdog_pressed = Some(now);
        }
        tracing::warn!(action = action.as_str_name(), "the guest's watchdog ran out");
        self.events.emit(Kind::Watchdog(pb::event::WatchdogBite {
            action: action.into(),
        }));
        match action {
            WatchdogAction::Unspecified | WatchdogAction::Reset => self.reset_or_defer("watchdog"),
            WatchdogAction::Poweroff => {
                let detail = "the guest's watchdog ran out, and its action is to power off";
                Some(VmExit::new(ExitReason::Watchdog, detail))
            }
            WatchdogAction::Shutdown => {
                let pressed = self.shut_down(false);
                pressed.err().map(|status| VmExit::error(status.message()))
            }
            WatchdogAction::Pause => self.pause_or_defer(PauseReason::Watchdog),
        }
    }
}
