//! The watchdog timer of Intel's 6300ESB I/O controller hub, as QEMU has it.
//!
//! A function with one BAR. Software starts the timer and reloads it; a timer that runs through both of its stages
//! without a reload bites. The first stage's interrupt is not raised: no driver asks for it. Linux drives it with
//! `i6300esb`.

mod state;
mod timer;

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use self::timer::{PRELOAD_MASK, Scale, Timer};
use super::config::{ConfigError, Identity};
use super::{Bar, BarKind, ConfigSpace, PciDevice};

/// Size of the BAR in bytes.
const BAR_SIZE: u64 = 16;
/// Configuration register, 16 bits, in configuration space.
const CONFIG: u16 = 0x60;
/// Lock register, 8 bits, in configuration space.
const LOCK: u16 = 0x68;

/// CONFIG: the kind of the first stage's interrupt.
const CONFIG_INTERRUPT: u16 = 0b11;
/// CONFIG: count microseconds, not milliseconds.
const CONFIG_MHZ: u16 = 1 << 2;
/// CONFIG: the end of the second stage has no effect.
const CONFIG_NO_REBOOT: u16 = 1 << 5;

/// LOCK: no further write changes this register until a reset.
const LOCK_LOCKED: u8 = 1 << 0;
/// LOCK: the timer runs.
const LOCK_ENABLE: u8 = 1 << 1;
/// LOCK: the timer starts again after the second stage.
const LOCK_FREE_RUN: u8 = 1 << 2;

/// First of the two preload registers in the BAR, 32 bits each.
const PRELOAD: usize = 0x00;
/// Reload register in the BAR, 16 bits.
const RELOAD: usize = 0x0c;
/// RELOAD: start the first stage again.
const RELOAD_START: u32 = 1 << 8;
/// RELOAD: the timer has bitten; writing it clears it.
const RELOAD_TIMEOUT: u32 = 1 << 9;
/// Values that, written to RELOAD one after the other, open the BAR's registers for one write.
const UNLOCK: [u32; 2] = [0x80, 0x86];

/// Time since any fixed moment.
type Clock = Box<dyn Fn() -> Duration + Send + Sync>;
/// Sets the time until the next call of [`I6300esb::alarm`], or `None` for no call.
pub type WatchdogTimer = Box<dyn Fn(Option<Duration>) + Send + Sync>;

/// How far a guest is with unlocking the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Access {
    Closed,
    HalfOpen,
    Open,
}

#[derive(Debug)]
struct State {
    space: ConfigSpace,
    config: u16,
    lock: u8,
    access: Access,
    timer: Timer,
    /// The timer has bitten. Survives a reset, so that the driver can tell.
    bitten: bool,
    /// Time at which the host's timer goes off, if it is set.
    armed: Option<Duration>,
    /// Time of the pause while the machine is paused.
    paused_at: Option<Duration>,
    /// Time that the machine has spent paused.
    skipped: Duration,
}

/// The device.
pub struct I6300esb {
    clock: Clock,
    host_timer: WatchdogTimer,
    state: Mutex<State>,
}

impl std::fmt::Debug for I6300esb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("I6300esb")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl State {
    /// Sets the watchdog's own registers to their power-on state, with the timer stopped.
    fn reset_registers(&mut self) {
        self.config = 0;
        self.lock = 0;
        self.access = Access::Closed;
        self.timer = Timer::new();
    }

    fn write_config(&mut self, value: u16) {
        self.config = value & (CONFIG_INTERRUPT | CONFIG_MHZ | CONFIG_NO_REBOOT);
        self.timer.scale = if value & CONFIG_MHZ == 0 {
            Scale::Khz
        } else {
            Scale::Mhz
        };
    }

    fn write_lock(&mut self, value: u8, now: Duration) {
        if self.lock & LOCK_LOCKED != 0 {
            return;
        }
        let was_enabled = self.lock & LOCK_ENABLE != 0;
        self.lock = value & (LOCK_LOCKED | LOCK_ENABLE | LOCK_FREE_RUN);
        match (was_enabled, value & LOCK_ENABLE != 0) {
            (false, true) => self.timer.start(now),
            (_, false) => self.timer.stop(),
            (true, true) => {}
        }
    }

    fn write_bar(&mut self, offset: usize, value: u32, now: Duration) {
        let access = std::mem::replace(&mut self.access, Access::Closed);
        match (offset, value, access) {
            (RELOAD, value, _) if value == UNLOCK[0] => self.access = Access::HalfOpen,
            (RELOAD, value, Access::HalfOpen) if value == UNLOCK[1] => self.access = Access::Open,
            (RELOAD, value, Access::Open) => {
                if value & RELOAD_START != 0 && self.lock & LOCK_ENABLE != 0 {
                    self.timer.start(now);
                }
                if value & RELOAD_TIMEOUT != 0 {
                    self.bitten = false;
                }
            }
            (0 | 4, value, Access::Open) => self.timer.preload[offset / 4] = value & PRELOAD_MASK,
            _ => {}
        }
    }

    /// The BAR's bytes as a guest reads them.
    fn bar(&self) -> [u8; BAR_SIZE as usize] {
        let mut bytes = [0; BAR_SIZE as usize];
        for (place, value) in bytes[PRELOAD..].chunks_exact_mut(4).zip(self.timer.preload) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        let reload = if self.bitten { RELOAD_TIMEOUT } else { 0 };
        bytes[RELOAD..].copy_from_slice(&reload.to_le_bytes());
        bytes
    }
}

impl I6300esb {
    /// A stopped watchdog whose BAR is at `bar`.
    ///
    /// # Errors
    /// `bar` is not a multiple of 16.
    pub fn new(bar: u64, host_timer: WatchdogTimer) -> Result<Self, ConfigError> {
        let start = Instant::now();
        Self::with_clock(bar, host_timer, Box::new(move || start.elapsed()))
    }

    /// As [`I6300esb::new`], with `clock` in place of the host's: the time since any fixed moment.
    ///
    /// # Errors
    /// `bar` is not a multiple of 16.
    pub fn with_clock(bar: u64, host_timer: WatchdogTimer, clock: Clock) -> Result<Self, ConfigError> {
        let mut space = ConfigSpace::new(Identity {
            vendor: 0x8086,
            device: 0x25ab,
            revision: 0,
            class: [0x08, 0x80, 0x00],
            subsystem_vendor: 0x1af4,
            subsystem: 0x1100,
        });
        space.add_bar(0, BAR_SIZE, BarKind::Registers, bar)?;
        let state = State {
            space,
            config: 0,
            lock: 0,
            access: Access::Closed,
            timer: Timer::new(),
            bitten: false,
            armed: None,
            paused_at: None,
            skipped: Duration::ZERO,
        };
        Ok(Self {
            clock,
            host_timer,
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The time that the guest has run.
    fn now(&self, state: &State) -> Duration {
        state
            .paused_at
            .unwrap_or_else(|| (self.clock)().saturating_sub(state.skipped))
    }

    /// Sets the host's timer if it would go off too late. A reload moves the end of a stage only; the timer that goes
    /// off too early for it is set again then, so that reloads cost nothing.
    fn arm(&self, state: &mut State) {
        let Some(due) = state.timer.due().filter(|_| state.paused_at.is_none()) else {
            return;
        };
        if state.armed.is_none_or(|armed| due < armed) {
            state.armed = Some(due);
            (self.host_timer)(Some(due.saturating_sub(self.now(state))));
        }
    }

    fn disarm(&self, state: &mut State) {
        if state.armed.take().is_some() {
            (self.host_timer)(None);
        }
    }

    /// The host's timer has gone off. True if the watchdog bites; it is disabled then, as after a reset.
    pub fn alarm(&self) -> bool {
        let mut state = self.state();
        state.armed = None;
        if state.paused_at.is_some() {
            return false;
        }
        let now = self.now(&state);
        let over = state.timer.expire(now);
        let bites = over && state.config & CONFIG_NO_REBOOT == 0;
        if bites {
            state.bitten = true;
            state.reset_registers();
        } else if over && state.lock & LOCK_FREE_RUN != 0 {
            state.timer.start(now);
        }
        self.arm(&mut state);
        bites
    }
}

/// The byte at `at` of configuration space, if it belongs to the watchdog's own registers.
fn own_register(state: &State, at: usize) -> Option<u8> {
    let [low, high] = state.config.to_le_bytes();
    match at.checked_sub(usize::from(CONFIG)) {
        Some(0) => Some(low),
        Some(1) => Some(high),
        _ => (at == usize::from(LOCK)).then_some(state.lock),
    }
}

impl PciDevice for I6300esb {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        let state = self.state();
        state.space.read(offset, data);
        for (at, byte) in (usize::from(offset)..).zip(data) {
            if let Some(own) = own_register(&state, at) {
                *byte = own;
            }
        }
    }

    fn config_write(&self, offset: u16, data: &[u8]) {
        let mut state = self.state();
        state.space.write(offset, data);
        let now = self.now(&state);
        let mut config = state.config.to_le_bytes();
        for (at, byte) in (usize::from(offset)..).zip(data) {
            match at.checked_sub(usize::from(CONFIG)) {
                Some(place @ (0 | 1)) => config[place] = *byte,
                _ if at == usize::from(LOCK) => state.write_lock(*byte, now),
                _ => {}
            }
        }
        state.write_config(u16::from_le_bytes(config));
        self.arm(&mut state);
    }

    fn bars(&self) -> Vec<Bar> {
        self.state().space.decoded()
    }

    fn bar_read(&self, _bar: u8, offset: u64, data: &mut [u8]) {
        let bytes = self.state().bar();
        for (at, byte) in (offset..).zip(data) {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            *byte = bytes.get(at).copied().unwrap_or(0);
        }
    }

    fn bar_write(&self, _bar: u8, offset: u64, data: &[u8]) {
        let mut value = [0; 4];
        let Some(bytes) = value.get_mut(..data.len()) else {
            return;
        };
        bytes.copy_from_slice(data);
        let mut state = self.state();
        let now = self.now(&state);
        state.write_bar(
            usize::try_from(offset).unwrap_or(usize::MAX),
            u32::from_le_bytes(value),
            now,
        );
        self.arm(&mut state);
    }

    fn bar_mapped(&self, _bar: u8, _address: Option<u64>) {}

    fn reset(&self) {
        let mut state = self.state();
        state.space.reset();
        state.reset_registers();
        // A machine that was paused runs again without `resume`.
        state.paused_at = None;
        self.disarm(&mut state);
    }
}

#[cfg(test)]
mod tests;
