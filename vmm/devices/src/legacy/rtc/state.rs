//! The state of the clock across a pause, a reset and a snapshot.

use serde::{Deserialize, Serialize};

use super::{B_ALARM, B_SET, C_IRQ, REG_B, REG_C, Rtc, power_on_ram};
use crate::component::{Bytes, Component, ComponentState, RestoreError, SaveError, check};

/// Most seconds between the guest's clock and the host's: more than the registers can express.
const OFFSET_LIMIT: u64 = 2_000_000_000_000;

/// The registers. The clock itself goes on while the guest does not run, as on battery-backed hardware.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RtcState {
    index: u8,
    /// Seconds from the host's clock to the guest's.
    offset: i64,
    /// Time registers that the guest sets, while it does.
    frozen: Option<Bytes>,
    ram: Bytes,
    /// Time of the next alarm on the guest's clock, in seconds since the epoch.
    alarm: Option<i64>,
}

impl Component for Rtc {
    /// The guest's clock adjustments stay, as on battery-backed hardware.
    fn reset(&self) {
        let mut state = self.state();
        (state.index, state.frozen, state.ram) = (0, None, power_on_ram());
        (state.due, state.paused, state.restored) = (None, false, false);
        (self.timer)(None);
    }

    fn pause(&self) {
        let mut state = self.state();
        state.paused = true;
        (self.timer)(None);
    }

    /// An alarm that was due meanwhile is raised at once. So is one that was raised before a save: its interrupt may
    /// not have reached the interrupt controller that was saved.
    fn resume(&self) {
        let mut state = self.state();
        if std::mem::take(&mut state.restored) && state.ram[usize::from(REG_C)] & C_IRQ != 0 {
            self.raise_interrupt();
        }
        if std::mem::take(&mut state.paused) {
            self.set_timer(&state);
        }
    }

    fn save(&self) -> Result<ComponentState, SaveError> {
        let state = self.state();
        if !state.paused {
            return Err(SaveError::Running);
        }
        ComponentState::new(&RtcState {
            index: state.index,
            offset: state.offset,
            frozen: state.frozen.map(Bytes::from),
            ram: state.ram.into(),
            alarm: state.due,
        })
    }

    fn restore(&self, saved: &ComponentState) -> Result<(), RestoreError> {
        let saved: RtcState = saved.parse()?;
        let ram = saved.ram.array::<128>("ram")?;
        let frozen = saved.frozen.map(|set| set.array("frozen")).transpose()?;
        let control = ram[usize::from(REG_B)];
        check(saved.index < 128, "index", "is above 127")?;
        let near = saved.offset.unsigned_abs() <= OFFSET_LIMIT;
        check(near, "offset", "is more than the registers can express")?;
        let set = control & B_SET != 0;
        check(frozen.is_some() == set, "frozen", "contradicts register B")?;
        let enabled = control & (B_ALARM | B_SET) == B_ALARM;
        check(
            enabled || saved.alarm.is_none(),
            "alarm",
            "contradicts register B",
        )?;
        let mut state = self.state();
        (state.index, state.offset, state.frozen, state.ram) = (saved.index, saved.offset, frozen, ram);
        (state.due, state.paused, state.restored) = (saved.alarm, true, true);
        (self.timer)(None);
        Ok(())
    }
}
