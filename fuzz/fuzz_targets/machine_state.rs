//! Feeds the document of a saved machine with changed values to its reader, the checks of the CPU and the machine, and
//! the parts of a machine. Asserts that what is accepted can be saved and restored again, and that a part of which the
//! state is refused keeps its own.

#![no_main]

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use arbitrary::Arbitrary;
use husk_devices::component::{Component, ComponentError, ComponentStates, Components, Stage};
use husk_devices::legacy::i8042::I8042;
use husk_devices::legacy::power::PowerRegisters;
use husk_devices::legacy::pvpanic::Pvpanic;
use husk_devices::legacy::rtc::Rtc;
use husk_devices::legacy::serial::SerialPort;
use husk_devices::pci::fake::FakeMsi;
use husk_devices::pci::{I6300esb, PciDevice, PciHotplug};
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::balloon::Balloon;
use husk_devices::virtio::rng::Rng;
use husk_devices::virtio::transport::VirtioPci;
use husk_devices::virtio::transport::fake::{FakeDevice, FakeIoEventFds, Machine};
use husk_fuzz::json::Mutation;
use husk_vmm::control::SavedVm;
use husk_vmm::cpuid::{CpuMismatch, check_saved};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

#[derive(Arbitrary, Debug)]
struct Input {
    started: bool,
    /// Changes of the devices only.
    devices: Vec<Mutation>,
    mutations: Vec<Mutation>,
    cut: Option<u16>,
}

const STORED: &str = include_str!("../../vmm/src/control/fixtures/state-1.json");
const WINDOW: u64 = 0x80_0000_0000;

/// Documents with the state of parts of which the functions are idle, and in use.
static DOCUMENTS: LazyLock<[Value; 2]> = LazyLock::new(|| {
    [false, true].map(|started| {
        let mut document: Value = serde_json::from_str(STORED).expect("JSON");
        let parts = Parts::new();
        if started {
            parts.function.machine.start();
        }
        parts.components.pause();
        let states = parts.components.save().expect("paused parts");
        document["machine"]["devices"] = serde_json::to_value(states).expect("JSON");
        document
    })
});

/// The stored machine.
static STORED_VM: LazyLock<SavedVm> =
    LazyLock::new(|| SavedVm::parse(STORED.as_bytes()).expect("the stored document"));

/// A virtio function with a device that records its calls.
struct Function {
    machine: Machine,
    device: FakeDevice,
}

struct Parts {
    function: Function,
    /// All parts, and those that start no threads once they run.
    components: Components,
    running: Components,
}

fn event() -> EventFd {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).expect("eventfd")
}

impl Parts {
    fn new() -> Self {
        let device = FakeDevice::default();
        let machine = Machine::new(device.clone());
        let (root, memory) = (machine.root.clone(), machine.mem.clone());
        let mut parts = Self {
            function: Function { machine, device },
            components: Components::default(),
            running: Components::default(),
        };
        let pci = parts.function.machine.pci.clone();
        parts.add(Stage::Function, "virtio-fake", pci, true);
        let devices: [Box<dyn VirtioDevice>; 2] = [Box::new(Rng::new()), Box::new(Balloon::new(true).0)];
        for (slot, device) in (4..).zip(devices) {
            let name = format!("virtio-{}", device.name());
            let events = Arc::new(FakeIoEventFds::default());
            let bar = WINDOW + u64::from(slot) * 0x4000;
            let function =
                VirtioPci::new(device, memory.clone(), &FakeMsi::default(), events, bar).expect("vectors");
            root.add(slot, function.clone()).expect("a free slot");
            parts.add(Stage::Function, &name, function, false);
        }
        let watchdog = Arc::new(I6300esb::new(WINDOW + 0x2_0000, Box::new(|_| ())).expect("an aligned BAR"));
        root.add(6, watchdog.clone() as Arc<dyn PciDevice>)
            .expect("a free slot");
        parts.add(Stage::Function, "i6300esb", watchdog, true);
        parts.add(Stage::Bus, "pci", root.clone(), true);
        let hotplug = PciHotplug::new(root, || (), |_, _| ());
        parts.add(Stage::Platform, "pci-hotplug", Arc::new(hotplug), true);
        let clock = Rtc::new(
            Box::new(|| Duration::from_secs(1_709_210_096)),
            0,
            Box::new(|_| ()),
            event(),
        );
        parts.add(Stage::Platform, "rtc", Arc::new(clock), true);
        let serial = SerialPort::new(event(), event(), event());
        parts.add(Stage::Platform, "serial", Arc::new(serial), true);
        let power = PowerRegisters::new(Arc::new(|_| ()), event());
        parts.add(Stage::Platform, "acpi-power", Arc::new(power), true);
        parts.add(
            Stage::Platform,
            "pvpanic",
            Arc::new(Pvpanic::new(Arc::new(|_| ()))),
            true,
        );
        parts.add(
            Stage::Platform,
            "i8042",
            Arc::new(I8042::new(Arc::new(|_| ()))),
            true,
        );
        parts
    }

    fn add(&mut self, stage: Stage, name: &str, part: Arc<dyn Component>, runs: bool) {
        if runs {
            self.running
                .insert(stage, name, part.clone())
                .expect("a new name");
        }
        self.components.insert(stage, name, part).expect("a new name");
    }

    fn restore(states: &ComponentStates) {
        let parts = Self::new();
        parts.components.pause();
        let fresh = parts.components.save().expect("paused parts");
        let restored = parts.components.restore(states);
        if let Err(error) = restored {
            let now = parts.components.save().expect("paused parts");
            // The part that is refused, and those behind it, keep what they have.
            let refused = match &error {
                ComponentError::Restore { name, .. } => name.as_str(),
                _ => "virtio-fake",
            };
            let kept = parts.components.names().skip_while(|name| *name != refused);
            kept.for_each(|name| assert_eq!(now[name], fresh[name], "{name} after {error}"));
        } else {
            let taken = parts.components.save().expect("paused parts");
            let twin = Self::new();
            twin.components.pause();
            twin.components.restore(&taken).expect("their own states");
            let again = twin.components.save().expect("paused parts");
            assert_eq!(without_generation(&again), without_generation(&taken));
            parts.running.resume();
            let journal = parts.function.device.journal();
            assert!(journal.violations.is_empty(), "{:?}", journal.violations);
        }
        parts.components.reset();
        // A reset ejects functions whose removal was requested: there is no vendor then.
        let machine = &parts.function.machine;
        if machine.config(0) != [0xff, 0xff] {
            machine.start();
            assert_eq!(machine.status(), 0xf, "a reset heals all");
        }
    }
}

/// States without the generation of configurations, which each restore increments.
fn without_generation(states: &ComponentStates) -> Value {
    let mut states = serde_json::to_value(states).expect("JSON");
    for (_, state) in states.as_object_mut().into_iter().flatten() {
        if let Some(fields) = state.as_object_mut() {
            fields.remove("generation");
        }
    }
    states
}

fuzz_target!(|input: Input| {
    let stored = &DOCUMENTS[usize::from(input.started)];
    let mut document = stored.clone();
    input
        .mutations
        .iter()
        .take(4)
        .for_each(|mutation| mutation.apply(&mut document));
    if let Some(devices) = document.pointer_mut("/machine/devices") {
        input
            .devices
            .iter()
            .take(6)
            .for_each(|mutation| mutation.apply(devices));
    }
    let mut text = serde_json::to_vec(&document).expect("JSON");
    if let Some(len) = input.cut {
        text.truncate(len.into());
    }
    let Ok(saved) = SavedVm::parse(&text) else {
        return assert!(
            document != *stored || input.cut.is_some(),
            "the stored document is read"
        );
    };
    let written = serde_json::to_vec(&saved).expect("JSON");
    let again = SavedVm::parse(&written).expect("what was written is read");
    assert_eq!(serde_json::to_vec(&again).expect("JSON"), written);

    let (machine, own) = (&saved.machine, &STORED_VM.machine);
    let same = machine.description == own.description;
    match machine.description.check(&own.description) {
        Ok(()) => assert!(same || machine.description.nic_slots.is_empty()),
        Err(mismatch) => assert!(!same && !mismatch.to_string().is_empty()),
    }
    let offered = own.vcpus[0].cpuid();
    for vcpu in &machine.vcpus {
        let cpuid = vcpu.cpuid();
        match check_saved(&cpuid, &offered) {
            Ok(()) => assert!(cpuid.len() <= text.len()),
            Err(CpuMismatch::Features(names)) => assert!(!names.is_empty()),
            Err(mismatch) => assert!(!mismatch.to_string().is_empty()),
        }
        assert!(cpuid != offered || check_saved(&cpuid, &offered).is_ok());
    }
    if !input.devices.is_empty() || !input.mutations.is_empty() {
        Parts::restore(&machine.devices);
    }
});
