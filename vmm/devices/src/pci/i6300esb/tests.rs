use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;
use crate::component::Component;
use crate::component::testing::{mutate, mutation};

const BAR: u64 = 0x80_0010_0000;
const SECOND: u64 = 1000;
const NEVER: Vec<u64> = Vec::new();

type Alarms = Arc<Mutex<Vec<Option<Duration>>>>;

/// A watchdog, its clock in milliseconds, and what the host's timer was set to.
struct Rig {
    device: I6300esb,
    clock: Arc<AtomicU64>,
    alarms: Alarms,
}

fn rig() -> Rig {
    let (clock, alarms) = (Arc::new(AtomicU64::new(0)), Alarms::default());
    let (time, log) = (clock.clone(), alarms.clone());
    let device = I6300esb::with_clock(
        BAR,
        Box::new(move |due| log.lock().unwrap().push(due)),
        Box::new(move || Duration::from_millis(time.load(Ordering::Relaxed))),
    );
    Rig {
        device: device.unwrap(),
        clock,
        alarms,
    }
}

impl Rig {
    fn unlock(&self) {
        self.device.bar_write(0, 0x0c, &[0x80, 0]);
        self.device.bar_write(0, 0x0c, &[0x86, 0]);
    }

    fn reload(&self, value: u16) {
        self.unlock();
        self.device.bar_write(0, 0x0c, &value.to_le_bytes());
    }

    /// As the driver of Linux: both stages half of `seconds`, then start.
    fn start(&self, seconds: u32) {
        self.device.config_write(0x60, &[3, 0]);
        for preload in [0, 4] {
            self.unlock();
            self.device.bar_write(0, preload, &(seconds << 9).to_le_bytes());
        }
        self.reload(0x100);
        self.device.config_write(0x68, &[2]);
    }

    fn reload_register(&self) -> u16 {
        let mut word = [0; 2];
        self.device.bar_read(0, 0x0c, &mut word);
        u16::from_le_bytes(word)
    }

    fn config(&self, offset: u16) -> u8 {
        let mut byte = [0];
        self.device.config_read(offset, &mut byte);
        byte[0]
    }

    /// Lets time pass as the host does: an alarm at each time that the timer was set to. Returns the times of bites.
    fn pass(&self, ms: u64) -> Vec<u64> {
        let end = self.clock.load(Ordering::Relaxed) + ms;
        let mut bites = Vec::new();
        while self.clock.load(Ordering::Relaxed) < end {
            let now = self.clock.fetch_add(1, Ordering::Relaxed) + 1;
            let armed = self.device.state().armed;
            let skipped = self.device.state().skipped;
            if armed.is_some_and(|at| at + skipped <= Duration::from_millis(now)) && self.device.alarm() {
                bites.push(now);
            }
        }
        bites
    }

    fn alarms(&self) -> usize {
        self.alarms.lock().unwrap().len()
    }
}

#[test]
fn the_function_is_what_drivers_look_for() {
    let rig = rig();
    let mut header = [0; 16];
    rig.device.config_read(0, &mut header);
    assert_eq!(header[..4], [0x86, 0x80, 0xab, 0x25]);
    assert_eq!(
        header[9..12],
        [0x00, 0x80, 0x08],
        "class: other system peripheral"
    );
    assert_eq!(rig.device.bars(), []);
    rig.device.config_write(4, &[2, 0]);
    let bar = Bar {
        index: 0,
        address: BAR,
        size: 16,
    };
    assert_eq!(rig.device.bars(), [bar]);
}

#[test]
fn it_bites_after_both_stages_and_the_driver_can_tell_after_the_reset() {
    let rig = rig();
    rig.start(4);
    assert_eq!(rig.pass(4026), NEVER, "4 s are 4.03 s by a 33 MHz bus");
    assert_eq!(rig.pass(4 * SECOND), [4028]);
    assert_eq!(rig.reload_register(), 0x200);
    assert_eq!(rig.config(0x68), 0, "disabled");
    PciDevice::reset(&rig.device);
    assert_eq!(rig.reload_register(), 0x200);
    rig.device.bar_write(0, 0x0c, &[0, 2]);
    assert_eq!(rig.reload_register(), 0x200, "the registers are locked");
    rig.reload(0x200);
    assert_eq!(rig.reload_register(), 0);
}

#[test]
fn reloads_keep_it_quiet_and_cost_the_host_nothing() {
    let rig = rig();
    rig.start(4);
    let before = rig.alarms();
    for _ in 0..400 {
        assert_eq!(rig.pass(100), NEVER);
        rig.reload(0x100);
    }
    let wakes = rig.alarms() - before;
    assert!(
        (10..=25).contains(&wakes),
        "{wakes} alarms in 40 s with 400 reloads"
    );
    assert_eq!(rig.pass(5 * SECOND).len(), 1);
}

#[test]
fn nothing_wakes_while_it_is_off() {
    let rig = rig();
    assert_eq!(rig.pass(100 * SECOND), NEVER);
    rig.reload(0x100);
    assert_eq!(rig.alarms(), 0, "a reload of a disabled timer");
    rig.start(4);
    rig.device.config_write(0x68, &[0]);
    assert_eq!(rig.pass(10 * SECOND), NEVER);
    let alarms = rig.alarms();
    assert_eq!((rig.pass(1000 * SECOND), rig.alarms()), (NEVER, alarms));
}

#[test]
fn time_stands_still_while_the_machine_is_paused() {
    let rig = rig();
    rig.start(4);
    assert_eq!(rig.pass(3 * SECOND), NEVER);
    rig.device.pause();
    assert_eq!(rig.alarms.lock().unwrap().last(), Some(&None));
    assert_eq!(rig.pass(100 * SECOND), NEVER);
    assert!(!rig.device.alarm(), "nor does a late alarm count");
    rig.device.resume();
    let bites = rig.pass(10 * SECOND);
    assert!((104_000..=104_100).contains(&bites[0]), "{bites:?}");
    rig.device.pause();
    PciDevice::reset(&rig.device);
    rig.start(4);
    let start = rig.clock.load(Ordering::Relaxed);
    let bites = rig.pass(10 * SECOND);
    assert_eq!(bites.iter().map(|at| at - start).collect::<Vec<_>>(), [4028]);
}

#[test]
fn registers_open_for_one_write_after_both_values() {
    let rig = rig();
    let preload = |rig: &Rig| {
        let mut dword = [0; 4];
        rig.device.bar_read(0, 0, &mut dword);
        u32::from_le_bytes(dword)
    };
    let write = |value: u32| rig.device.bar_write(0, 0, &value.to_le_bytes());
    write(5);
    rig.device.bar_write(0, 0x0c, &[0x86, 0]);
    write(5);
    rig.device.bar_write(0, 0x0c, &[0x80, 0]);
    write(5);
    rig.device.bar_write(0, 0x0c, &[0x86, 0]);
    write(5);
    assert_eq!(preload(&rig), 0xf_ffff);
    rig.unlock();
    write(0xff00_0005);
    write(6);
    assert_eq!(preload(&rig), 5);
}

#[test]
fn a_locked_watchdog_cannot_be_stopped_before_a_reset() {
    let rig = rig();
    rig.start(4);
    rig.device.config_write(0x68, &[3]);
    rig.device.config_write(0x68, &[0]);
    assert_eq!(rig.config(0x68), 3);
    assert_eq!(rig.pass(5 * SECOND).len(), 1);
    PciDevice::reset(&rig.device);
    rig.device.config_write(0x68, &[4]);
    assert_eq!(rig.config(0x68), 4);
}

#[test]
fn without_reboot_it_runs_out_in_silence_and_free_running_goes_on_slowly() {
    let rig = rig();
    rig.start(4);
    rig.device.config_write(0x60, &[0x20]);
    assert_eq!(rig.pass(10 * SECOND), NEVER);
    let alarms = rig.alarms();
    assert_eq!((rig.pass(10 * SECOND), rig.alarms()), (NEVER, alarms), "stopped");
    // The shortest stages, for ever.
    rig.start(0);
    rig.device.config_write(0x60, &[0x24]);
    rig.device.config_write(0x68, &[0]);
    rig.device.config_write(0x68, &[6]);
    let alarms = rig.alarms();
    assert_eq!(rig.pass(SECOND), NEVER);
    assert!(rig.alarms() - alarms <= 1001);
}

#[test]
fn accesses_of_any_width_reach_the_registers_they_cover() {
    let rig = rig();
    rig.device
        .config_write(0x5e, &[0xff, 0xff, 0x27, 0xff, 0xff, 0xff, 0xff, 0xff]);
    let mut word = [0; 2];
    rig.device.config_read(0x60, &mut word);
    assert_eq!(u16::from_le_bytes(word), 0x27);
    rig.device.config_write(0x68, &[0x04, 0xff, 0xff, 0xff]);
    let mut dword = [0; 4];
    rig.device.config_read(0x68, &mut dword);
    assert_eq!(dword, [4, 0, 0, 0]);
    let mut all = [0xff; 8];
    rig.device.bar_read(0, 12, &mut all);
    assert_eq!(all, [0; 8]);
}

#[derive(Clone, Debug)]
enum Step {
    Config(u16, Vec<u8>),
    Bar(u64, Vec<u8>),
    Unlock,
    Pass(u64),
    Pause,
    Resume,
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let data = || {
        prop::sample::select(vec![1_usize, 2, 4, 8]).prop_flat_map(|n| prop::collection::vec(any::<u8>(), n))
    };
    prop_oneof![
        (prop_oneof![0x5c..0x6c_u16, any::<u16>()], data()).prop_map(|(at, data)| Step::Config(at, data)),
        (prop_oneof![0..16_u64, any::<u64>()], data()).prop_map(|(at, data)| Step::Bar(at, data)),
        Just(Step::Unlock),
        (0..200_u64).prop_map(Step::Pass),
        Just(Step::Pause),
        Just(Step::Resume),
        Just(Step::Reset),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..Default::default() })]

    /// Whatever a guest writes, it bites only while it is enabled and runs, and the host's timer goes off at most once
    /// a millisecond.
    #[test]
    fn any_accesses_are_survived(steps in prop::collection::vec(step(), 0..60)) {
        let rig = rig();
        let mut paused = false;
        for step in steps {
            match step {
                Step::Config(at, data) => {
                    rig.device.config_write(at, &data);
                    let mut read = data;
                    rig.device.config_read(at, &mut read);
                }
                Step::Bar(at, data) => {
                    rig.device.bar_write(0, at, &data);
                    let mut read = data;
                    rig.device.bar_read(0, at, &mut read);
                }
                Step::Unlock => rig.unlock(),
                Step::Pass(ms) => {
                    let enabled = rig.config(0x68) & 2 != 0;
                    let alarms = rig.alarms();
                    let bites = rig.pass(ms);
                    prop_assert!(bites.is_empty() || enabled && !paused && rig.config(0x68) == 0);
                    prop_assert!((rig.alarms() - alarms) as u64 <= ms);
                }
                Step::Pause => {
                    rig.device.pause();
                    paused = true;
                }
                Step::Resume => {
                    rig.device.resume();
                    paused = false;
                }
                Step::Reset => PciDevice::reset(&rig.device),
            }
        }
    }

    /// A watchdog that is saved and restored between any two accesses bites when one that is only paused does, and its
    /// registers read the same.
    #[test]
    fn a_restored_watchdog_continues(steps in prop::collection::vec(step(), 0..60)) {
        let plain = rig();
        let mut saved = rig();
        [&plain, &saved].into_iter().for_each(|rig| rig.start(1));
        for step in steps {
            match step {
                Step::Config(at, data) => {
                    [&plain, &saved].into_iter().for_each(|rig| rig.device.config_write(at, &data));
                }
                Step::Bar(at, data) => {
                    [&plain, &saved].into_iter().for_each(|rig| rig.device.bar_write(0, at, &data));
                }
                Step::Unlock => {
                    [&plain, &saved].into_iter().for_each(Rig::unlock);
                }
                Step::Pass(ms) => {
                    let bites = [&plain, &saved].map(|rig| rig.pass(8 * ms).len());
                    prop_assert_eq!(bites[0], bites[1]);
                }
                Step::Pause | Step::Resume => {
                    plain.device.pause();
                    plain.device.resume();
                    saved.device.pause();
                    let state = saved.device.save().unwrap();
                    saved = rig();
                    saved.clock.store(12_345, Ordering::Relaxed);
                    saved.device.restore(&state).unwrap();
                    saved.clock.fetch_add(777, Ordering::Relaxed);
                    prop_assert_eq!(saved.device.save().unwrap(), state);
                    saved.device.resume();
                }
                Step::Reset => {
                    [&plain, &saved].into_iter().for_each(|rig| PciDevice::reset(&rig.device));
                }
            }
            let registers = [&plain, &saved].map(|rig| {
                let mut bytes = [0; 16];
                rig.device.bar_read(0, 0, &mut bytes);
                let config: Vec<_> = (0..=255).map(|at| rig.config(at)).collect();
                (bytes, config)
            });
            prop_assert_eq!(&registers[0], &registers[1]);
        }
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(
        start in any::<bool>(),
        changes in prop::collection::vec(mutation(), 1..4),
    ) {
        let rig = rig();
        if start {
            rig.start(2);
        }
        prop_assert!(matches!(rig.device.save(), Err(crate::component::SaveError::Running)));
        rig.device.pause();
        let fresh = rig.device.save().unwrap();
        let mut state = fresh.clone();
        changes.iter().for_each(|(place, change)| mutate(&mut state, *place, change));
        if rig.device.restore(&state).is_err() {
            prop_assert_eq!(rig.device.save().unwrap(), fresh);
        }
        rig.device.resume();
        rig.pass(10);
        rig.start(1);
    }
}
