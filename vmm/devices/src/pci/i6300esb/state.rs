//! The state of the watchdog across a pause and a snapshot. Its timer counts the time that the guest runs.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::timer::{LONGEST, PRELOAD_MASK, Stage};
use super::{
    Access, CONFIG_INTERRUPT, CONFIG_MHZ, CONFIG_NO_REBOOT, I6300esb, LOCK_ENABLE, LOCK_FREE_RUN, LOCK_LOCKED,
};
use crate::component::{Bytes, Component, ComponentState, RestoreError, SaveError, check};
use crate::pci::PciDevice;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WatchdogState {
    config_space: Bytes,
    /// The configuration register.
    config: u16,
    /// The lock register.
    lock: u8,
    access: Access,
    preload: [u32; 2],
    running: Option<Running>,
    bitten: bool,
}

/// The timer while it runs.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Running {
    stage: Stage,
    /// Nanoseconds until the end of the stage.
    left: u64,
}

impl Component for I6300esb {
    fn reset(&self) {
        PciDevice::reset(self);
    }

    fn pause(&self) {
        let mut state = self.state();
        state.paused_at = Some(self.now(&state));
        self.disarm(&mut state);
    }

    /// Continues with the time that was left.
    fn resume(&self) {
        let mut state = self.state();
        if let Some(at) = state.paused_at.take() {
            state.skipped = (self.clock)().saturating_sub(at);
        }
        self.arm(&mut state);
    }

    fn save(&self) -> Result<ComponentState, SaveError> {
        let state = self.state();
        let now = state.paused_at.ok_or(SaveError::Running)?;
        let running = state.timer.left(now).map(|(stage, left)| Running {
            stage,
            left: u64::try_from(left.as_nanos()).unwrap_or(u64::MAX),
        });
        ComponentState::new(&WatchdogState {
            config_space: state.space.save(),
            config: state.config,
            lock: state.lock,
            access: state.access,
            preload: state.timer.preload,
            running,
            bitten: state.bitten,
        })
    }

    fn restore(&self, saved: &ComponentState) -> Result<(), RestoreError> {
        let saved: WatchdogState = saved.parse()?;
        let known = saved.config & !(CONFIG_INTERRUPT | CONFIG_MHZ | CONFIG_NO_REBOOT) == 0;
        check(known, "config", "has reserved bits")?;
        let known = saved.lock & !(LOCK_LOCKED | LOCK_ENABLE | LOCK_FREE_RUN) == 0;
        check(known, "lock", "has reserved bits")?;
        let narrow = saved.preload.iter().all(|preload| *preload <= PRELOAD_MASK);
        check(narrow, "preload", "has more than 20 bits")?;
        let running = saved
            .running
            .map(|running| (running.stage, Duration::from_nanos(running.left)));
        if let Some((_, left)) = running {
            check(left <= LONGEST, "running.left", "is longer than any stage")?;
            check(
                saved.lock & LOCK_ENABLE != 0,
                "running",
                "contradicts the lock register",
            )?;
        }
        let mut state = self.state();
        state.space.check(&saved.config_space, "config_space")?;
        state.space.load(&saved.config_space);
        let now = self.now(&state);
        state.paused_at = Some(now);
        self.disarm(&mut state);
        state.write_config(saved.config);
        (state.lock, state.access, state.bitten) = (saved.lock, saved.access, saved.bitten);
        state.timer.preload = saved.preload;
        state.timer.set_left(running, now);
        Ok(())
    }
}
