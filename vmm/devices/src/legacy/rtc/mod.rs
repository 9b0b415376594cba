//! The CMOS clock (Motorola MC146818A): time and alarm registers over the host's clock.
//!
//! Read-only apart from the alarm and the guest's own adjustments, which are kept as an offset. The
//! periodic and update interrupts are not raised: Linux emulates both on top of the alarm.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vmm_sys_util::eventfd::EventFd;

use crate::bus::BusDevice;

mod state;

/// Index port; the data port follows.
pub const PORT: u64 = 0x70;
/// Length of the port range.
pub const LEN: u64 = 2;
/// ISA interrupt of the alarm.
pub const IRQ: u32 = 8;
/// Register that holds the century, as in the FADT.
pub const CENTURY: u8 = 0x32;

const SECONDS: u8 = 0x00;
const SECONDS_ALARM: u8 = 0x01;
const MINUTES: u8 = 0x02;
const MINUTES_ALARM: u8 = 0x03;
const HOURS: u8 = 0x04;
const HOURS_ALARM: u8 = 0x05;
const WEEKDAY: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const REG_A: u8 = 0x0a;
const REG_B: u8 = 0x0b;
const REG_C: u8 = 0x0c;
const REG_D: u8 = 0x0d;

const A_32KHZ_1024HZ: u8 = 0x26;
const A_UPDATE: u8 = 1 << 7;
const B_24H: u8 = 1 << 1;
const B_BINARY: u8 = 1 << 2;
const B_ALARM: u8 = 1 << 5;
const B_SET: u8 = 1 << 7;
const C_ALARM: u8 = 1 << 5;
const C_IRQ: u8 = 1 << 7;
const D_VALID: u8 = 1 << 7;
const DONT_CARE: u8 = 0xc0;
const DAY_SECONDS: i64 = 86_400;
/// Time before an update of the registers in which register A announces it.
const UPDATE_NOTICE: Duration = Duration::from_micros(244);

/// Time since the epoch, UTC, from the host.
pub type WallClock = Box<dyn Fn() -> Duration + Send + Sync>;
/// Sets the time until the next alarm, or `None` for no alarm.
pub type AlarmTimer = Box<dyn Fn(Option<Duration>) + Send + Sync>;

/// The host's wall clock.
pub fn host_clock() -> WallClock {
    Box::new(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

struct State {
    index: u8,
    offset: i64,
    frozen: Option<[u8; 10]>,
    ram: [u8; 128],
    /// Time of the next alarm on the guest's clock.
    due: Option<i64>,
    paused: bool,
    /// The registers are of a saved clock, and the clock has not resumed since.
    restored: bool,
}

/// The clock.
pub struct Rtc {
    clock: WallClock,
    timer: AlarmTimer,
    interrupt: EventFd,
    state: Mutex<State>,
}

impl std::fmt::Debug for Rtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Rtc")
    }
}

struct Civil {
    year: i64,
    month: u8,
    day: u8,
    weekday: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

/// Days to civil date in the proleptic Gregorian calendar, counted in 400-year eras that start in March.
fn civil(seconds: i64) -> Civil {
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    Civil {
        year: yoe + era * 400 + i64::from(month <= 2),
        month: month as u8,
        day: (doy - (153 * mp + 2) / 5 + 1) as u8,
        weekday: ((days + 4).rem_euclid(7) + 1) as u8,
        hour: (rest / 3600) as u8,
        minute: (rest / 60 % 60) as u8,
        second: (rest % 60) as u8,
    }
}

fn seconds(year: i64, month: i64, day: i64, of_day: i64) -> i64 {
    let y = year - i64::from(month <= 2);
    let era = y.div_euclid(400);
    let yoe = y.rem_euclid(400);
    let mp = if month > 2 { month - 3 } else { month + 9 };
    let doe = yoe * 365 + yoe / 4 - yoe / 100 + (153 * mp + 2) / 5 + day - 1;
    (era * 146_097 + doe - 719_468) * 86_400 + of_day
}

impl State {
    fn encode(&self, value: u8) -> u8 {
        if self.ram[REG_B as usize] & B_BINARY != 0 {
            value
        } else {
            ((value / 10) << 4) | (value % 10)
        }
    }

    fn decode(&self, value: u8) -> u8 {
        if self.ram[REG_B as usize] & B_BINARY != 0 {
            value
        } else {
            (value >> 4) * 10 + (value & 0xf)
        }
    }

    fn encode_hour(&self, hour: u8) -> u8 {
        if self.ram[REG_B as usize] & B_24H != 0 {
            return self.encode(hour);
        }
        let pm = if hour >= 12 { 0x80 } else { 0 };
        self.encode(if hour.is_multiple_of(12) { 12 } else { hour % 12 }) | pm
    }

    fn decode_hour(&self, value: u8) -> u8 {
        if self.ram[REG_B as usize] & B_24H != 0 {
            return self.decode(value);
        }
        self.decode(value & 0x7f) % 12 + if value & 0x80 != 0 { 12 } else { 0 }
    }

    /// Time registers 0–9 (alarm slots left as they are) for `now`.
    fn registers(&self, now: &Civil) -> [u8; 10] {
        let mut r = [0; 10];
        r[SECONDS as usize] = self.encode(now.second);
        r[SECONDS_ALARM as usize] = self.ram[SECONDS_ALARM as usize];
        r[MINUTES as usize] = self.encode(now.minute);
        r[MINUTES_ALARM as usize] = self.ram[MINUTES_ALARM as usize];
        r[HOURS as usize] = self.encode_hour(now.hour);
        r[HOURS_ALARM as usize] = self.ram[HOURS_ALARM as usize];
        r[WEEKDAY as usize] = self.encode(now.weekday);
        r[DAY as usize] = self.encode(now.day);
        r[MONTH as usize] = self.encode(now.month);
        r[YEAR as usize] = self.encode(now.year.rem_euclid(100) as u8);
        r
    }
}

impl Rtc {
    /// A clock that shows `clock` plus `offset` seconds. It sets alarms with `timer`, whose owner calls
    /// [`Rtc::alarm`] when one is due.
    pub fn new(clock: WallClock, offset: i64, timer: AlarmTimer, interrupt: EventFd) -> Self {
        let state = Mutex::new(State {
            index: 0,
            offset,
            frozen: None,
            ram: power_on_ram(),
            due: None,
            paused: false,
            restored: false,
        });
        Self {
            clock,
            timer,
            interrupt,
            state,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The timer has gone off. If the alarm is due, raises the interrupt and arms the next. While the clock is paused,
    /// the alarm waits for it to resume.
    pub fn alarm(&self) {
        let mut state = self.state();
        if state.paused {
            return;
        }
        // The guest may have set another alarm since, and the host's clock may have been set.
        if state.due.is_none_or(|due| due > self.now(&state)) {
            return self.set_timer(&state);
        }
        state.ram[REG_C as usize] |= C_ALARM | C_IRQ;
        self.raise_interrupt();
        self.arm(&mut state);
    }

    fn raise_interrupt(&self) {
        if let Err(error) = self.interrupt.write(1) {
            tracing::warn!(%error, "RTC interrupt");
        }
    }

    fn now(&self, state: &State) -> i64 {
        self.host_seconds().saturating_add(state.offset)
    }

    fn host_seconds(&self) -> i64 {
        (self.clock)().as_secs() as i64
    }

    /// True in the last moments of a second. A guest that then waits reads registers of one and the same second.
    fn update_is_near(&self) -> bool {
        let second = (self.clock)().subsec_nanos();
        Duration::from_secs(1) - Duration::from_nanos(second.into()) <= UPDATE_NOTICE
    }

    fn arm(&self, state: &mut State) {
        state.due = self.next_alarm(state);
        self.set_timer(state);
    }

    fn set_timer(&self, state: &State) {
        let due = state.due.filter(|_| !state.paused);
        let now = (self.clock)();
        let left = due.map(|due| {
            // On the host's clock, whose seconds begin with the guest's.
            let due = due.saturating_sub(state.offset).max(0).unsigned_abs();
            let left = Duration::from_secs(due).saturating_sub(now);
            left.min(Duration::from_secs(DAY_SECONDS.unsigned_abs()))
        });
        (self.timer)(left);
    }

    fn next_alarm(&self, state: &State) -> Option<i64> {
        if state.ram[REG_B as usize] & (B_ALARM | B_SET) != B_ALARM {
            return None;
        }
        let wanted = |register: u8| {
            let value = state.ram[register as usize];
            let decoded = if register == HOURS_ALARM {
                state.decode_hour(value)
            } else {
                state.decode(value)
            };
            (value & DONT_CARE != DONT_CARE).then_some(decoded)
        };
        let (h, m, s) = (wanted(HOURS_ALARM), wanted(MINUTES_ALARM), wanted(SECONDS_ALARM));
        if h.is_some_and(|h| h > 23) || m.is_some_and(|m| m > 59) || s.is_some_and(|s| s > 59) {
            return None;
        }
        let now = self.now(state);
        // At most a day of candidates; whole hours and minutes that cannot match are stepped over.
        let mut t = now + 1;
        while t <= now + DAY_SECONDS {
            let c = civil(t);
            t += match () {
                () if h.is_some_and(|h| h != c.hour) => 3600 - i64::from(c.minute) * 60 - i64::from(c.second),
                () if m.is_some_and(|m| m != c.minute) => 60 - i64::from(c.second),
                () if s.is_some_and(|s| s != c.second) => 1,
                () => return Some(t),
            };
        }
        None
    }

    /// Stores the offset between the clock that the guest set and the host's.
    fn adjust(&self, state: &mut State, set: [u8; 10], century: i64) {
        let dec = |r: u8| i64::from(state.decode(set[r as usize]));
        let (month, day) = (dec(MONTH), dec(DAY));
        if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
            return;
        }
        let of_day =
            i64::from(state.decode_hour(set[HOURS as usize])) * 3600 + dec(MINUTES) * 60 + dec(SECONDS);
        state.offset = seconds(century * 100 + dec(YEAR), month, day, of_day) - self.host_seconds();
    }

    fn read_register(&self) -> u8 {
        let mut state = self.state();
        let index = state.index;
        match index {
            SECONDS..=YEAR => {
                let now = civil(self.now(&state));
                state.frozen.unwrap_or_else(|| state.registers(&now))[index as usize]
            }
            CENTURY => {
                let year = civil(self.now(&state)).year;
                state.encode((year / 100).rem_euclid(100) as u8)
            }
            // A clock that the guest sets is not updated.
            REG_A if state.frozen.is_none() && self.update_is_near() => state.ram[REG_A as usize] | A_UPDATE,
            REG_C => std::mem::take(&mut state.ram[REG_C as usize]),
            REG_D => D_VALID,
            _ => state.ram[index as usize & 0x7f],
        }
    }

    fn write_register(&self, value: u8) {
        let mut state = self.state();
        let index = state.index;
        match index {
            SECONDS_ALARM | MINUTES_ALARM | HOURS_ALARM => {
                state.ram[index as usize] = value;
                self.arm(&mut state);
            }
            SECONDS..=YEAR => {
                let now = civil(self.now(&state));
                let mut set = state.frozen.unwrap_or_else(|| state.registers(&now));
                set[index as usize] = value;
                if state.frozen.is_some() {
                    state.frozen = Some(set)
                } else {
                    // The century's register is kept only while the clock is halted.
                    self.adjust(&mut state, set, now.year.div_euclid(100));
                    self.arm(&mut state);
                }
            }
            REG_A => state.ram[REG_A as usize] = value & 0x7f,
            REG_B => {
                let halted = state.frozen.is_some();
                if value & B_SET != 0 && !halted {
                    let now = civil(self.now(&state));
                    state.frozen = Some(state.registers(&now));
                    state.ram[CENTURY as usize] = state.encode((now.year / 100).rem_euclid(100) as u8);
                } else if value & B_SET == 0
                    && let Some(set) = state.frozen.take()
                {
                    let century = state.decode(state.ram[CENTURY as usize]);
                    self.adjust(&mut state, set, century.into());
                }
                state.ram[REG_B as usize] = value;
                self.arm(&mut state);
            }
            REG_C | REG_D => {}
            _ => state.ram[index as usize & 0x7f] = value,
        }
    }
}

fn power_on_ram() -> [u8; 128] {
    let mut ram = [0; 128];
    ram[REG_A as usize] = A_32KHZ_1024HZ;
    ram[REG_B as usize] = B_24H;
    ram
}

impl BusDevice for Rtc {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset == 1 {
            data[0] = self.read_register();
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0 {
            // Bit 7 masks NMIs on a PC; there are none.
            self.state().index = data[0] & 0x7f;
        } else {
            self.write_register(data[0]);
        }
        // A word written to the index port also reaches the data port.
        if offset == 0 && data.len() == 2 {
            self.write_register(data[1]);
        }
    }
}

#[cfg(test)]
mod tests;
