//! The clock and its alarm.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;
use crate::component::Component;
use crate::component::testing::{mutate, mutation};

const T: i64 = 1_709_210_096; // 2024-02-29 12:34:56 UTC, a Thursday

type Armed = Arc<Mutex<Vec<Option<Duration>>>>;

/// The host's clock, in nanoseconds.
fn host_clock(seconds: f64) -> Arc<AtomicU64> {
    let clock = Arc::new(AtomicU64::new(0));
    turn(&clock, seconds);
    clock
}

fn turn(clock: &AtomicU64, seconds: f64) {
    let time = Duration::from_secs(T as u64) + Duration::from_secs_f64(seconds);
    clock.store(time.as_nanos() as u64, Ordering::SeqCst);
}

fn rtc(offset: i64) -> (Rtc, Armed, EventFd) {
    rtc_with(offset, &host_clock(0.0))
}

fn rtc_with(offset: i64, clock: &Arc<AtomicU64>) -> (Rtc, Armed, EventFd) {
    let clock = Arc::clone(clock);
    let clock = Box::new(move || Duration::from_nanos(clock.load(Ordering::SeqCst)));
    let armed = Armed::default();
    let log = armed.clone();
    let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let timer = Box::new(move |d| log.lock().unwrap().push(d));
    (
        Rtc::new(clock, offset, timer, irq.try_clone().unwrap()),
        armed,
        irq,
    )
}

fn get(rtc: &Rtc, index: u8) -> u8 {
    let mut byte = [0];
    rtc.write(0, &[index]);
    rtc.read(1, &mut byte);
    byte[0]
}

fn set(rtc: &Rtc, index: u8, value: u8) {
    rtc.write(0, &[index]);
    rtc.write(1, &[value]);
}

#[test]
fn shows_the_time_in_bcd_and_binary() {
    let (rtc, _, _) = rtc(0);
    let read = |r: &Rtc| [CENTURY, YEAR, MONTH, DAY, WEEKDAY, HOURS, MINUTES, SECONDS].map(|i| get(r, i));
    assert_eq!(read(&rtc), [0x20, 0x24, 0x02, 0x29, 0x05, 0x12, 0x34, 0x56]);
    set(&rtc, REG_B, B_24H | B_BINARY);
    assert_eq!(read(&rtc), [20, 24, 2, 29, 5, 12, 34, 56]);
    set(&rtc, REG_B, B_BINARY);
    assert_eq!(get(&rtc, HOURS), 0x80 | 12, "12-hour mode, noon is PM");
    assert_eq!(get(&rtc, REG_D), D_VALID);
}

#[test]
fn the_last_moments_of_a_second_are_told_to_the_guest() {
    let clock = host_clock(0.0);
    let (rtc, ..) = rtc_with(-3600, &clock);
    let updating = |rtc: &Rtc| get(rtc, REG_A) == A_32KHZ_1024HZ | A_UPDATE;
    for (second, near) in [
        (0.0, false),
        (0.9997, false),
        (0.9998, true),
        (0.999_999, true),
        (1.0, false),
    ] {
        turn(&clock, second);
        assert_eq!(updating(&rtc), near, "{second}");
    }
    turn(&clock, 1.9999);
    set(&rtc, REG_B, B_24H | B_SET);
    assert_eq!(get(&rtc, REG_A), A_32KHZ_1024HZ, "the clock is halted");
    set(&rtc, REG_A, 0xff);
    set(&rtc, REG_B, B_24H);
    assert_eq!(get(&rtc, REG_A), 0xff);
    turn(&clock, 2.0);
    assert_eq!(get(&rtc, REG_A), 0x7f, "the bit is read-only");
}

#[test]
fn a_clock_set_by_the_guest_continues_from_there() {
    let (rtc, _, _) = rtc(-3600);
    assert_eq!(get(&rtc, HOURS), 0x11);
    set(&rtc, REG_B, B_24H | B_SET);
    for (index, value) in [
        (YEAR, 0x31),
        (MONTH, 0x12),
        (DAY, 0x31),
        (HOURS, 0x23),
        (MINUTES, 0x59),
    ] {
        set(&rtc, index, value);
    }
    set(&rtc, REG_B, B_24H);
    assert_eq!(
        [YEAR, MONTH, DAY, HOURS].map(|i| get(&rtc, i)),
        [0x31, 0x12, 0x31, 0x23]
    );
    rtc.reset();
    assert_eq!(get(&rtc, YEAR), 0x31);
}

#[test]
fn the_alarm_fires_at_its_time_and_is_cleared_by_reading_c() {
    let clock = host_clock(0.0);
    let (rtc, armed, irq) = rtc_with(0, &clock);
    set(&rtc, HOURS_ALARM, 0x12);
    set(&rtc, MINUTES_ALARM, 0x35);
    set(&rtc, SECONDS_ALARM, 0x00);
    set(&rtc, REG_B, B_24H | B_ALARM);
    assert_eq!(
        armed.lock().unwrap().last().unwrap(),
        &Some(Duration::from_secs(4))
    );
    turn(&clock, 4.0);
    rtc.alarm();
    assert_eq!(irq.read().unwrap(), 1);
    assert_eq!(get(&rtc, REG_C), C_ALARM | C_IRQ);
    assert_eq!(get(&rtc, REG_C), 0);
    set(&rtc, REG_B, B_24H);
    assert_eq!(armed.lock().unwrap().last().unwrap(), &None);
    rtc.alarm();
    assert!(irq.read().is_err(), "a late timer finds the alarm off");
}

#[test]
fn an_alarm_earlier_in_the_day_is_tomorrows_and_an_impossible_one_never_is() {
    let (rtc, armed, _) = rtc(0);
    set(&rtc, HOURS_ALARM, 0x12);
    set(&rtc, MINUTES_ALARM, 0x34);
    set(&rtc, SECONDS_ALARM, 0x56);
    set(&rtc, REG_B, B_24H | B_ALARM);
    assert_eq!(
        armed.lock().unwrap().last().unwrap(),
        &Some(Duration::from_secs(86_400))
    );
    set(&rtc, MINUTES_ALARM, 0x77);
    assert_eq!(armed.lock().unwrap().last().unwrap(), &None);
}

#[test]
fn an_alarm_is_due_at_the_start_of_its_second() {
    let clock = host_clock(0.9);
    let (rtc, armed, irq) = rtc_with(-3600, &clock);
    let last = || armed.lock().unwrap().last().unwrap().unwrap();
    for register in [HOURS_ALARM, MINUTES_ALARM, SECONDS_ALARM] {
        set(&rtc, register, DONT_CARE);
    }
    set(&rtc, REG_B, B_24H | B_ALARM);
    assert_eq!(last(), Duration::from_millis(100));
    turn(&clock, 1.25);
    rtc.alarm();
    assert_eq!(irq.read().unwrap(), 1);
    assert_eq!(last(), Duration::from_millis(750));
}

#[test]
fn an_alarm_that_was_moved_as_it_rang_does_not_fire_early() {
    let clock = host_clock(0.5);
    let (rtc, armed, irq) = rtc_with(0, &clock);
    for (register, value) in [(HOURS_ALARM, 0x12), (MINUTES_ALARM, 0x34), (SECONDS_ALARM, 0x57)] {
        set(&rtc, register, value);
    }
    set(&rtc, REG_B, B_24H | B_ALARM);
    turn(&clock, 1.5);
    set(&rtc, SECONDS_ALARM, 0x59);
    rtc.alarm();
    assert!(irq.read().is_err(), "the timer went off for the alarm before");
    assert_eq!(get(&rtc, REG_C), 0);
    let last = *armed.lock().unwrap().last().unwrap();
    assert_eq!(last, Some(Duration::from_millis(1500)));
    turn(&clock, 3.0);
    rtc.alarm();
    assert_eq!((irq.read().unwrap(), get(&rtc, REG_C)), (1, C_ALARM | C_IRQ));
}

#[test]
fn an_impossible_alarm_costs_nothing() {
    let (rtc, armed, _) = rtc(0);
    set(&rtc, REG_B, B_24H | B_ALARM);
    for register in [HOURS_ALARM, MINUTES_ALARM, SECONDS_ALARM] {
        set(&rtc, register, DONT_CARE);
    }
    for (register, value) in [(SECONDS_ALARM, 0x7f), (MINUTES_ALARM, 0x60), (HOURS_ALARM, 0x24)] {
        let start = std::time::Instant::now();
        for _ in 0..5000 {
            set(&rtc, register, value);
        }
        assert!(start.elapsed() < Duration::from_secs(1), "{register}");
        assert_eq!(*armed.lock().unwrap().last().unwrap(), None);
        set(&rtc, register, DONT_CARE);
        assert!(armed.lock().unwrap().last().unwrap().is_some());
    }
}

#[test]
fn a_time_that_is_set_while_the_clock_runs_keeps_the_century() {
    let (rtc, _, _) = rtc(0);
    set(&rtc, HOURS, 0x13);
    let read = [CENTURY, YEAR, MONTH, DAY, HOURS, MINUTES].map(|i| get(&rtc, i));
    assert_eq!(read, [0x20, 0x24, 0x02, 0x29, 0x13, 0x34]);
}

proptest! {
    #[test]
    fn civil_dates_round_trip(t in -62_000_000_000i64..250_000_000_000) {
        let c = civil(t);
        let of_day = i64::from(c.hour) * 3600 + i64::from(c.minute) * 60 + i64::from(c.second);
        prop_assert_eq!(seconds(c.year, c.month.into(), c.day.into(), of_day), t);
    }

    #[test]
    fn any_access_sequence_is_survived(
        ops in prop::collection::vec((any::<bool>(), 0u64..2, any::<u8>()), 0..200),
    ) {
        let (rtc, _, _) = rtc(0);
        for (write, port, value) in ops {
            if write { rtc.write(port, &[value]) } else { rtc.read(port, &mut [0]) }
        }
    }
}

#[test]
fn an_alarm_waits_for_the_end_of_a_pause() {
    let clock = host_clock(0.0);
    let (rtc, armed, irq) = rtc_with(0, &clock);
    set(&rtc, REG_B, B_24H | B_ALARM);
    for (index, value) in [(HOURS_ALARM, 0x12), (MINUTES_ALARM, 0x34), (SECONDS_ALARM, 0x59)] {
        set(&rtc, index, value);
    }
    let last = |armed: &Armed| *armed.lock().unwrap().last().unwrap();
    assert_eq!(last(&armed), Some(Duration::from_secs(3)));
    rtc.pause();
    assert_eq!(last(&armed), None);
    turn(&clock, 3.0);
    rtc.alarm();
    assert!(irq.read().is_err(), "the timer went off just before");
    let saved = rtc.save().unwrap();

    turn(&clock, 0.0);
    let (later, armed, irq) = rtc_with(0, &clock);
    let text = serde_json::to_string(&saved).unwrap();
    later.restore(&serde_json::from_str(&text).unwrap()).unwrap();
    assert_eq!(last(&armed), None);
    later.resume();
    assert_eq!(last(&armed), Some(Duration::from_secs(3)));
    turn(&clock, 3.0);
    later.alarm();
    assert_eq!((irq.read().unwrap(), get(&later, REG_C)), (1, C_ALARM | C_IRQ));

    let mut passed: serde_json::Value = saved.into();
    passed["alarm"] = (T - 100).into();
    let (late, armed, _) = self::rtc(0);
    late.restore(&passed.into()).unwrap();
    late.resume();
    assert_eq!(last(&armed), Some(Duration::ZERO), "it was due meanwhile");
}

#[test]
fn an_alarm_that_was_raised_before_a_save_is_raised_again_after_the_restore() {
    let clock = host_clock(0.0);
    let (rtc, _, irq) = rtc_with(0, &clock);
    for (index, value) in [(HOURS_ALARM, 0x12), (MINUTES_ALARM, 0x34), (SECONDS_ALARM, 0x57)] {
        set(&rtc, index, value);
    }
    set(&rtc, REG_B, B_24H | B_ALARM);
    turn(&clock, 1.0);
    rtc.alarm();
    assert_eq!(irq.read().unwrap(), 1);
    rtc.pause();
    let saved = rtc.save().unwrap();
    rtc.resume();
    assert!(irq.read().is_err(), "it was not restored");

    let (later, _, irq) = rtc_with(0, &clock);
    later.restore(&saved).unwrap();
    assert!(irq.read().is_err());
    later.resume();
    assert_eq!(irq.read().unwrap(), 1);
    later.pause();
    later.resume();
    assert!(irq.read().is_err(), "once");
    assert_eq!(get(&later, REG_C), C_ALARM | C_IRQ);
    later.pause();
    let read = later.save().unwrap();
    later.restore(&read).unwrap();
    later.resume();
    assert!(irq.read().is_err(), "the guest has seen it");
}

#[test]
fn a_running_clock_is_not_saved() {
    let (rtc, _, _) = rtc(0);
    assert!(matches!(rtc.save(), Err(crate::component::SaveError::Running)));
}

proptest! {
    /// A guest that is saved and restored between any two accesses reads what it reads without that.
    #[test]
    fn a_restored_clock_continues(
        steps in prop::collection::vec((0..0x80_u8, any::<Option<u8>>(), any::<bool>()), 1..60),
    ) {
        let (plain, ..) = rtc(7);
        let (mut saved, ..) = rtc(7);
        for (index, value, save) in steps {
            match value {
                Some(value) => [&plain, &saved].map(|rtc| set(rtc, index, value)),
                None => {
                    prop_assert_eq!(get(&plain, index), get(&saved, index));
                    [(), ()]
                }
            };
            if save {
                saved.pause();
                let state = saved.save().unwrap();
                (saved, ..) = rtc(0);
                saved.restore(&state).unwrap();
                prop_assert_eq!(saved.save().unwrap(), state);
                saved.resume();
            }
        }
        for index in 0..0x80 {
            prop_assert_eq!(get(&plain, index), get(&saved, index));
        }
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(
        registers in prop::collection::vec((0..0x80_u8, any::<u8>()), 0..20),
        changes in prop::collection::vec(mutation(), 1..4),
    ) {
        let (rtc, ..) = rtc(0);
        registers.into_iter().for_each(|(index, value)| set(&rtc, index, value));
        rtc.pause();
        let fresh = rtc.save().unwrap();
        let mut state = fresh.clone();
        changes.iter().for_each(|(place, change)| mutate(&mut state, *place, change));
        if rtc.restore(&state).is_err() {
            prop_assert_eq!(rtc.save().unwrap(), fresh);
        }
        rtc.resume();
        rtc.alarm();
        for index in 0..0x80 {
            get(&rtc, index);
            set(&rtc, index, 0x12);
        }
    }
}
