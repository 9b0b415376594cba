//! Feeds accesses to configuration space and registers, time and pauses to the watchdog. Asserts that it bites only
//! while it is enabled and the machine runs, that the host's timer goes off at most once a millisecond, and that a
//! watchdog which is saved and restored continues like one that is only paused.

#![no_main]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arbitrary::Arbitrary;
use husk_devices::component::{Component, ComponentState};
use husk_devices::pci::{I6300esb, PciDevice};
use husk_fuzz::accesses::Data;
use husk_fuzz::json::Mutation;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    steps: Vec<Step>,
    mutations: Vec<Mutation>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Step {
    Config(u16, Data),
    Lock(u8),
    Mode(u8),
    Bar(u8, Data),
    Register(u8, Data),
    Unlock,
    /// As a driver does, with these counts.
    Start(u16, u16),
    Reload(u16),
    Pass(u16),
    Pause,
    Reset,
}

const MILLISECOND: u64 = 1_000_000;

/// A watchdog, its clock and the host's timer in nanoseconds.
struct Rig {
    device: I6300esb,
    clock: Arc<AtomicU64>,
    timer: Arc<Mutex<Option<u64>>>,
}

impl Rig {
    fn new(now: u64) -> Self {
        let (clock, timer) = (
            Arc::new(AtomicU64::new(now)),
            Arc::<Mutex<Option<u64>>>::default(),
        );
        let (time, shown, armed) = (clock.clone(), clock.clone(), timer.clone());
        let device = I6300esb::with_clock(
            0x80_0010_0000,
            Box::new(move |due| {
                let due = due.map(|due| time.load(Ordering::Relaxed) + due.as_nanos() as u64);
                *armed.lock().expect("no panic") = due;
            }),
            Box::new(move || Duration::from_nanos(shown.load(Ordering::Relaxed))),
        );
        let device = device.expect("an aligned BAR");
        Self { device, clock, timer }
    }

    fn config(&self, offset: u16) -> u8 {
        let mut byte = [0];
        self.device.config_read(offset, &mut byte);
        byte[0]
    }

    /// Lets time pass as the host does. Returns the bites, and how often the timer went off.
    fn pass(&self, nanoseconds: u64) -> (u32, u64) {
        let end = self.clock.load(Ordering::Relaxed) + nanoseconds;
        let (mut bites, mut alarms) = (0, 0);
        loop {
            let due = *self.timer.lock().expect("no panic");
            let Some(due) = due.filter(|due| *due <= end) else {
                break;
            };
            self.clock.fetch_max(due, Ordering::Relaxed);
            *self.timer.lock().expect("no panic") = None;
            alarms += 1;
            bites += u32::from(self.device.alarm());
        }
        self.clock.store(end, Ordering::Relaxed);
        (bites, alarms)
    }

    fn unlock(&self) {
        self.device.bar_write(0, 0x0c, &[0x80, 0]);
        self.device.bar_write(0, 0x0c, &[0x86, 0]);
    }

    fn apply(&self, step: Step) -> Vec<u8> {
        match step {
            Step::Config(at, data) => {
                let mut bytes = data.bytes(8);
                self.device.config_write(at % 0x1000, &bytes);
                self.device.config_read(at % 0x1000, &mut bytes);
                return bytes;
            }
            Step::Lock(value) => self.device.config_write(0x68, &[value]),
            Step::Mode(value) => self.device.config_write(0x60, &[value]),
            Step::Bar(at, data) => {
                let mut bytes = data.bytes(8);
                self.device.bar_write(0, at.into(), &bytes);
                self.device.bar_read(0, at.into(), &mut bytes);
                return bytes;
            }
            Step::Register(at, data) => self.device.bar_write(0, u64::from(at % 16), &data.bytes(8)),
            Step::Unlock => self.unlock(),
            Step::Start(first, second) => {
                for (register, count) in [(0, first), (4, second)] {
                    self.unlock();
                    self.device
                        .bar_write(0, register, &u32::from(count).to_le_bytes());
                }
                self.device.config_write(0x68, &[2]);
            }
            Step::Reload(value) => {
                self.unlock();
                self.device.bar_write(0, 0x0c, &value.to_le_bytes());
            }
            Step::Pass(milliseconds) => {
                let enabled = self.config(0x68) & 2 != 0;
                let (bites, alarms) = self.pass(u64::from(milliseconds % 2048) * MILLISECOND);
                assert!(bites == 0 || enabled && self.config(0x68) == 0);
                assert!(bites <= 1 && alarms <= u64::from(milliseconds % 2048) + 1);
                return vec![bites as u8];
            }
            Step::Pause => {
                self.device.pause();
                assert_eq!(*self.timer.lock().expect("no panic"), None);
                self.device.resume();
            }
            Step::Reset => PciDevice::reset(&self.device),
        }
        Vec::new()
    }

    fn save(&self) -> ComponentState {
        self.device.pause();
        self.device.save().expect("a paused device")
    }
}

fuzz_target!(|input: Input| {
    let plain = Rig::new(0);
    let mut saved = Rig::new(0);
    for step in input.steps.iter().take(48) {
        let answer = plain.apply(*step);
        if let Step::Pause = step {
            let state = saved.save();
            // Another host, on which no time passes for the guest.
            let twin = Rig::new(12_345);
            twin.device.restore(&state).expect("its own state");
            twin.clock.fetch_add(777 * MILLISECOND, Ordering::Relaxed);
            assert_eq!(twin.device.save().expect("a paused device"), state);
            twin.device.resume();
            saved = twin;
        } else {
            assert_eq!(saved.apply(*step), answer, "{step:?}");
        }
        let registers = [&plain, &saved].map(|rig| {
            let mut bytes = [0; 16];
            rig.device.bar_read(0, 0, &mut bytes);
            (
                bytes,
                rig.config(4),
                rig.config(0x60),
                rig.config(0x68),
                rig.device.bars(),
            )
        });
        assert_eq!(registers[0], registers[1], "{step:?}");
    }
    assert_eq!(plain.save(), saved.save());

    let fresh = saved.save();
    let mut document = fresh.clone().into();
    input
        .mutations
        .iter()
        .take(4)
        .for_each(|mutation| mutation.apply(&mut document));
    match saved.device.restore(&document.into()) {
        Ok(()) => {
            let state = saved.save();
            Rig::new(0).device.restore(&state).expect("its own state");
        }
        Err(_) => assert_eq!(saved.save(), fresh, "a state that is refused"),
    }
    saved.device.resume();
    input
        .steps
        .iter()
        .take(16)
        .for_each(|step| drop(saved.apply(*step)));
});
