//! Feeds port accesses of any width, console input and time to the serial port, the clock, the power registers, pvpanic
//! and the keyboard controller. Asserts that devices which are saved and restored in between answer like those which are
//! only paused, and that a state which is refused changes nothing.

#![no_main]

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arbitrary::Arbitrary;
use husk_devices::bus::Bus;
use husk_devices::component::{ComponentStates, Components, Stage};
use husk_devices::legacy::i8042::{self, I8042};
use husk_devices::legacy::power::{self, PowerEvent, PowerRegisters};
use husk_devices::legacy::pvpanic::{self, Pvpanic};
use husk_devices::legacy::rtc::{self, Rtc};
use husk_devices::legacy::serial::{self, SerialPort};
use husk_devices::legacy::{EventSink, MachineEvent};
use husk_fuzz::accesses::Data;
use husk_fuzz::json::Mutation;
use libfuzzer_sys::fuzz_target;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

#[derive(Arbitrary, Debug)]
struct Input {
    steps: Vec<Step>,
    mutations: Vec<Mutation>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Write(Port, Data),
    Read(Port, Data),
    SetClock { register: u8, value: u8 },
    GetClock(u8),
    Input(Vec<u8>),
    Output(u8),
    Notify(u8),
    Pass(u16),
    Pause,
    Reset,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Port {
    Serial(u8),
    Clock(u8),
    Power(u8),
    Pvpanic,
    Keyboard(u8),
    Any(u16),
}

impl Port {
    fn number(self) -> u64 {
        match self {
            Self::Serial(at) => serial::PORT + u64::from(at) % serial::LEN,
            Self::Clock(at) => rtc::PORT + u64::from(at) % rtc::LEN,
            Self::Power(at) => power::PORT + u64::from(at) % power::LEN,
            Self::Pvpanic => pvpanic::PORT,
            Self::Keyboard(at) => i8042::PORT + u64::from(at) % i8042::LEN,
            Self::Any(port) => port.into(),
        }
    }
}

/// 2024-02-29 12:34:56 UTC
const START: i64 = 1_709_210_096;

struct Rig {
    ports: Bus,
    serial: Arc<SerialPort>,
    rtc: Arc<Rtc>,
    power: Arc<PowerRegisters>,
    parts: Components,
    clock: Arc<AtomicI64>,
    /// Time until the clock's alarm.
    timer: Arc<Mutex<Option<Duration>>>,
    events: Arc<Mutex<Vec<MachineEvent>>>,
}

fn event() -> EventFd {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).expect("eventfd")
}

impl Rig {
    fn new(now: i64) -> Self {
        let (timer, events) = (Arc::new(Mutex::default()), Arc::<Mutex<Vec<_>>>::default());
        let clock = Arc::new(AtomicI64::new(now));
        let (armed, time, log) = (Arc::clone(&timer), clock.clone(), events.clone());
        let sink: EventSink = Arc::new(move |event| log.lock().expect("no panic").push(event));
        let serial = Arc::new(SerialPort::new(event(), event(), event()));
        let rtc = Arc::new(Rtc::new(
            Box::new(move || Duration::from_secs(time.load(Ordering::Relaxed).unsigned_abs())),
            0,
            Box::new(move |due| *armed.lock().expect("no panic") = due),
            event(),
        ));
        let power = Arc::new(PowerRegisters::new(sink.clone(), event()));
        let pvpanic = Arc::new(Pvpanic::new(sink.clone()));
        let i8042 = Arc::new(I8042::new(sink));
        let ports = Bus::new();
        let add = |start, len, device| ports.insert(start, len, device).expect("free ports");
        add(serial::PORT, serial::LEN, serial.clone());
        add(rtc::PORT, rtc::LEN, rtc.clone());
        add(power::PORT, power::LEN, power.clone());
        add(pvpanic::PORT, 1, pvpanic.clone());
        add(i8042::PORT, i8042::LEN, i8042.clone());
        let mut parts = Components::default();
        let mut part = |name, part| parts.insert(Stage::Platform, name, part).expect("a new name");
        part("serial", serial.clone());
        part("rtc", rtc.clone());
        part("acpi-power", power.clone());
        part("pvpanic", pvpanic);
        part("i8042", i8042);
        Self {
            ports,
            serial,
            rtc,
            power,
            parts,
            clock,
            timer,
            events,
        }
    }

    fn read(&self, port: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xaa; len];
        self.ports.read(port, &mut bytes);
        bytes
    }

    fn timer(&self) -> Option<Duration> {
        *self.timer.lock().expect("no panic")
    }

    /// Lets time pass, with an alarm where the timer goes off.
    fn pass(&self, seconds: i64) {
        let end = self.clock.load(Ordering::Relaxed) + seconds;
        for _ in 0..4 {
            let now = self.clock.load(Ordering::Relaxed);
            let Some(left) = self.timer().map(|left| left.as_secs() as i64) else {
                break;
            };
            if now + left > end {
                *self.timer.lock().expect("no panic") = Some(Duration::from_secs((now + left - end) as u64));
                break;
            }
            self.clock.store(now + left, Ordering::Relaxed);
            *self.timer.lock().expect("no panic") = None;
            self.rtc.alarm();
        }
        self.clock.store(end, Ordering::Relaxed);
    }

    fn apply(&self, step: &Step) -> Vec<u8> {
        match step {
            Step::Write(port, data) => _ = self.ports.write(port.number(), &data.bytes(4)),
            Step::Read(port, data) => return self.read(port.number(), data.len(4)),
            Step::SetClock { register, value } => {
                self.ports.write(rtc::PORT, &[*register]);
                self.ports.write(rtc::PORT + 1, &[*value]);
            }
            Step::GetClock(register) => {
                self.ports.write(rtc::PORT, &[*register]);
                return self.read(rtc::PORT + 1, 1);
            }
            Step::Input(input) => return vec![self.serial.send(input) as u8],
            Step::Output(limit) => return self.serial.take_output((*limit).into()),
            Step::Notify(which) => {
                let events = [
                    PowerEvent::PowerButton,
                    PowerEvent::PciHotplug,
                    PowerEvent::NewGeneration,
                ];
                self.power
                    .notify(events[usize::from(*which) % 3])
                    .expect("eventfd");
            }
            Step::Pass(seconds) => self.pass((*seconds).into()),
            Step::Pause => {
                self.parts.pause();
                self.parts.resume();
            }
            Step::Reset => self.parts.reset(),
        }
        Vec::new()
    }

    fn save(&self) -> ComponentStates {
        self.parts.pause();
        self.parts.save().expect("paused parts")
    }
}

fuzz_target!(|input: Input| {
    let plain = Rig::new(START);
    let mut saved = Rig::new(START);
    for step in input.steps.iter().take(48) {
        let answer = plain.apply(step);
        if let Step::Pause = step {
            let states = saved.save();
            let twin = Rig::new(saved.clock.load(Ordering::Relaxed));
            twin.parts.restore(&states).expect("their own states");
            assert_eq!(twin.parts.save().expect("paused parts"), states);
            twin.parts.resume();
            *twin.events.lock().expect("no panic") = saved.events.lock().expect("no panic").clone();
            saved = twin;
        } else {
            assert_eq!(saved.apply(step), answer, "{step:?}");
        }
        assert_eq!(plain.timer(), saved.timer(), "the alarm after {step:?}");
    }
    assert_eq!(
        *plain.events.lock().expect("no panic"),
        *saved.events.lock().expect("no panic")
    );
    assert_eq!(plain.save(), saved.save());

    let before = saved.save();
    let mut document = serde_json::to_value(&before).expect("JSON");
    input
        .mutations
        .iter()
        .take(4)
        .for_each(|mutation| mutation.apply(&mut document));
    let Ok(states) = serde_json::from_value::<ComponentStates>(document) else {
        return;
    };
    if saved.parts.restore(&states).is_ok() {
        saved.parts.resume();
        input
            .steps
            .iter()
            .take(16)
            .for_each(|step| drop(saved.apply(step)));
        let twin = Rig::new(saved.clock.load(Ordering::Relaxed));
        twin.parts.restore(&saved.save()).expect("their own states");
    }
});
