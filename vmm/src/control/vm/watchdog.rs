//! The action of a watchdog whose timer has run out.

use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::watchdog::Action as WatchdogAction;
use husk_proto::vmm::v1::{self as pb, ExitReason, PauseReason};
use tonic::Status;

use super::{Vm, VmExit};

impl Vm {
    /// Carries out the watchdog's action if the guest has let the timer run out.
    pub(super) fn watchdog_due(&mut self) -> Option<VmExit> {
        let running = self.running.as_ref()?;
        let action = running.watchdog.filter(|_| running.machine.watchdog_alarm())?;
        tracing::warn!(action = action.as_str_name(), "the guest's watchdog ran out");
        self.events.emit(Kind::Watchdog(pb::event::WatchdogBite {
            action: action.into(),
        }));
        let error = |status: Status| VmExit::error(status.message());
        match action {
            WatchdogAction::Unspecified | WatchdogAction::Reset => self.reset("watchdog"),
            WatchdogAction::Poweroff => {
                let detail = "the guest's watchdog ran out, and its action is to power off";
                Some(VmExit::new(ExitReason::Watchdog, detail))
            }
            WatchdogAction::Shutdown => self.shut_down(false).err().map(error),
            WatchdogAction::Pause => self.pause(PauseReason::Watchdog).err().map(error),
        }
    }
}
