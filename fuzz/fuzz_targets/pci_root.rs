//! Feeds accesses to configuration space, by ports and by ECAM, and to BARs to a PCI bus with a virtio function and plain
//! ones, between pauses, reboots and snapshots. Asserts that the MMIO bus has the BARs that are decoded and no others,
//! that the transport keeps its contract with the device, and that the device works after a reboot.

#![no_main]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use arbitrary::Arbitrary;
use husk_devices::bus::{Bus, BusDevice};
use husk_devices::component::Component;
use husk_devices::pci::fake::{Event, FAKE_BAR, FakeFunction};
use husk_devices::pci::{ConfigPorts, PciDevice};
use husk_devices::virtio::transport::fake::{FEATURES, Fail, FakeDevice, Machine, SLOT, VERSION_1, WINDOW};
use husk_devices::virtio::transport::{BAR_SIZE, status};
use husk_fuzz::accesses::Data;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Port {
        write: bool,
        offset: u8,
        data: Data,
    },
    /// By the address port and the data port.
    ByPorts {
        write: bool,
        slot: u8,
        register: Register,
        data: Data,
    },
    ByEcam {
        write: bool,
        slot: u8,
        register: Register,
        data: Data,
    },
    Ecam {
        write: bool,
        offset: u64,
        data: Data,
    },
    Command {
        slot: u8,
        command: u8,
    },
    Move {
        slot: u8,
        half_page: u8,
    },
    Memory {
        write: bool,
        half_page: u8,
        offset: u8,
        data: Data,
    },
    Virtio {
        write: bool,
        at: Place,
        data: Data,
    },
    Start {
        queue: u8,
        rings: [Ring; 3],
    },
    Reset,
    Pause,
    Resume,
    Reboot,
    Reload,
    Signal(u8),
    NeedsReset,
    Fail(u8),
    Add(u8),
    Remove(u8),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Register {
    Command,
    Bar(u8),
    Msix,
    Access(u8),
    Any(u16),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Place {
    Common(u8),
    Isr,
    Device(u8),
    Notify(u8),
    Table(u8),
    Pending(u8),
    Any(u16),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Ring {
    Page(u8),
    Any(u64),
}

impl Register {
    fn offset(self) -> u16 {
        match self {
            Self::Command => 4,
            Self::Bar(at) => 0x10 + u16::from(at % 8),
            Self::Msix => 0x42,
            Self::Access(at) => 0x8c + u16::from(at % 32),
            Self::Any(at) => at % 0x1000,
        }
    }
}

impl Place {
    fn offset(self) -> u64 {
        match self {
            Self::Common(at) => u64::from(at % 0x40),
            Self::Isr => 0x100,
            Self::Device(at) => 0x800 + u64::from(at % 16),
            Self::Notify(at) => 0x1000 + u64::from(at % 24),
            Self::Table(at) => 0x2000 + u64::from(at),
            Self::Pending(at) => 0x3000 + u64::from(at % 16),
            Self::Any(at) => u64::from(at) % BAR_SIZE,
        }
    }
}

/// A plain function and the address that it was told.
struct Plain {
    slot: u8,
    function: Arc<FakeFunction>,
    told: Option<u64>,
}

struct Rig {
    machine: Machine,
    ports: Bus,
    device: FakeDevice,
    plain: Vec<Plain>,
}

/// Of the window of [`Machine`].
const WINDOW_SIZE: u64 = 0x10_0000;

fn overlap((a, a_len): (u64, u64), (b, b_len): (u64, u64)) -> bool {
    a < b + b_len && b < a + a_len
}

fn in_window((start, len): (u64, u64)) -> bool {
    start >= WINDOW
        && start
            .checked_add(len)
            .is_some_and(|end| end <= WINDOW + WINDOW_SIZE)
}

impl Rig {
    fn new() -> Self {
        let device = FakeDevice::default();
        let machine = Machine::new(device.clone());
        let ports = Bus::new();
        let config = Arc::new(ConfigPorts::new(machine.root.clone()));
        ports.insert(0xcf8, 8, config).expect("free ports");
        let mut rig = Self {
            machine,
            ports,
            device,
            plain: Vec::new(),
        };
        rig.add(1);
        rig.add(2);
        rig
    }

    fn add(&mut self, slot: u8) {
        let function = FakeFunction::new(slot, WINDOW + 0x8000 + u64::from(slot) * FAKE_BAR);
        let added = self.machine.root.add(slot, function.clone()).is_ok();
        let free =
            slot != 0 && slot != SLOT && slot < 32 && !self.plain.iter().any(|plain| plain.slot == slot);
        assert_eq!(added, free, "slot {slot}");
        if added {
            self.plain.push(Plain {
                slot,
                function,
                told: None,
            });
        }
    }

    fn access(bus: &dyn BusDevice, write: bool, offset: u64, data: Data, widest: usize) {
        let mut bytes = data.bytes(widest);
        match write {
            true => bus.write(offset, &bytes),
            false => bus.read(offset, &mut bytes),
        }
    }

    /// The address of the virtio function's BAR, if it is mapped.
    fn mapped(&self) -> Option<u64> {
        let bar = self.machine.pci.bars().first().copied()?;
        // The pending bits, of which few are there. A plain function would read as its slot.
        let mut bytes = [0xff; 8];
        let there = self
            .machine
            .mmio
            .read(bar.address.checked_add(0x3000)?, &mut bytes);
        (there && bytes[7] == 0).then_some(bar.address)
    }

    fn virtio(&self, write: bool, offset: u64, data: Data) {
        let Some(bar) = self.mapped() else { return };
        let mut bytes = data.bytes(8);
        match write {
            true => self.machine.mmio.write(bar + offset, &bytes),
            false => self.machine.mmio.read(bar + offset, &mut bytes),
        };
    }

    fn reboot(&self) {
        self.plain.iter().for_each(|plain| plain.function.reset());
        self.machine.reboot();
    }

    fn apply(&mut self, step: &Step) {
        let m = &mut self.machine;
        match *step {
            Step::Port { write, offset, data } => {
                let (offset, mut bytes) = (0xcf8 + u64::from(offset % 9), data.bytes(4));
                match write {
                    true => self.ports.write(offset, &bytes),
                    false => self.ports.read(offset, &mut bytes),
                };
            }
            Step::ByPorts {
                write,
                slot,
                register,
                data,
            } => {
                let register = register.offset() & 0xff;
                let address = 1 << 31 | u32::from(slot % 6) << 11 | u32::from(register & 0xfc);
                assert!(self.ports.write(0xcf8, &address.to_le_bytes()));
                let (offset, mut bytes) = (0xcfc + u64::from(register & 3), data.bytes(4));
                match write {
                    true => self.ports.write(offset, &bytes),
                    false => self.ports.read(offset, &mut bytes),
                };
            }
            Step::ByEcam {
                write,
                slot,
                register,
                data,
            } => {
                let offset = u64::from(slot % 6) << 15 | u64::from(register.offset());
                Self::access(&*m.ecam, write, offset, data, 8);
            }
            Step::Ecam { write, offset, data } => Self::access(&*m.ecam, write, offset, data, 8),
            Step::Command { slot, command } => m.ecam.write(u64::from(slot % 6) << 15 | 4, &[command]),
            Step::Move { slot, half_page } => {
                let bar = WINDOW + u64::from(half_page) * 0x800;
                m.ecam.write(u64::from(slot % 6) << 15 | 0x10, &bar.to_le_bytes());
            }
            Step::Memory {
                write,
                half_page,
                offset,
                data,
            } => {
                let (at, mut bytes) = (
                    WINDOW + u64::from(half_page) * 0x800 + u64::from(offset),
                    data.bytes(8),
                );
                match write {
                    true => m.mmio.write(at, &bytes),
                    false => m.mmio.read(at, &mut bytes),
                };
            }
            Step::Virtio { write, at, data } => self.virtio(write, at.offset(), data),
            Step::Start { queue, rings } => {
                m.enable();
                if let Some(bar) = self.mapped() {
                    let m = &mut self.machine;
                    m.bar = bar;
                    m.enable_vectors();
                    m.negotiate(FEATURES | VERSION_1);
                    let rings = rings.map(|ring| match ring {
                        Ring::Page(page) => u64::from(page) << 12,
                        Ring::Any(address) => address,
                    });
                    m.queue((queue % 4).into(), 8, rings);
                    m.ready();
                }
            }
            Step::Reset => self.virtio_status(0),
            Step::Pause => m.pci.pause(),
            Step::Resume => m.pci.resume(),
            Step::Reboot => self.reboot(),
            Step::Reload => {
                m.pci.pause();
                let bus = Component::save(&*m.root).expect("the bus is saved");
                if let Ok(state) = m.pci.save() {
                    m.reboot();
                    m.pci.restore(&state).expect("its own state");
                    m.root.restore(&bus).expect("its own state");
                    m.pci.resume();
                }
            }
            Step::Signal(queue) => {
                let interrupt = self.device.journal().interrupt.clone();
                if let Some(interrupt) = interrupt {
                    interrupt.signal_queue((queue % 5).into());
                    interrupt.signal_config();
                }
            }
            Step::NeedsReset => {
                let interrupt = self.device.journal().interrupt.clone();
                if let Some(interrupt) = interrupt {
                    interrupt.needs_reset("told to");
                }
            }
            // Panics would end the process here.
            Step::Fail(how) => {
                let fail = [None, Some(Fail::Activate), Some(Fail::LoseQueues)];
                self.device.journal().fail = fail[usize::from(how) % 3];
            }
            Step::Add(slot) => self.add(slot % 34),
            Step::Remove(slot) => {
                let slot = slot % 34;
                let at = self.plain.iter().position(|plain| plain.slot == slot);
                if slot != SLOT {
                    assert_eq!(m.root.remove(slot).is_some(), at.is_some());
                    at.map(|at| self.plain.swap_remove(at));
                }
            }
        }
    }

    fn virtio_status(&self, status: u8) {
        if let Some(bar) = self.mapped() {
            self.machine.mmio.write(bar + 0x14, &[status]);
        }
    }

    fn check(&mut self) {
        let mut waiting = Vec::new();
        let mut mapped = Vec::new();
        for Plain { function, told, slot } in &mut self.plain {
            for event in function.log() {
                if let Event::Placed(address) = event {
                    *told = address;
                }
            }
            let decoded = function.bars().first().map(|bar| (bar.address, bar.size));
            match (*told, decoded) {
                (Some(address), Some(bar)) => {
                    assert_eq!(address, bar.0, "slot {slot}");
                    let mut byte = [0];
                    assert!(self.machine.mmio.read(address, &mut byte) && byte == [*slot]);
                    mapped.push(bar);
                }
                (Some(_), None) => panic!("slot {slot} is mapped and decodes nothing"),
                (None, Some(bar)) => waiting.push(bar),
                (None, None) => {}
            }
        }
        let bar = self.mapped();
        let decoded = self.machine.pci.bars().first().map(|bar| (bar.address, bar.size));
        match (bar, decoded) {
            (Some(address), _) => mapped.push((address, BAR_SIZE)),
            (None, Some(bar)) => waiting.push(bar),
            (None, None) => {}
        }
        assert!(mapped.iter().all(|bar| in_window(*bar)), "{mapped:x?}");
        for (at, bar) in mapped.iter().enumerate() {
            assert!(
                !mapped[..at].iter().any(|other| overlap(*bar, *other)),
                "{mapped:x?}"
            );
        }
        for bar in waiting.into_iter().filter(|bar| in_window(*bar)) {
            assert!(
                mapped.iter().any(|other| overlap(bar, *other)),
                "{bar:x?} is free, but not mapped"
            );
        }

        let mut bits = [0];
        self.machine.pci.bar_read(0, 0x14, &mut bits);
        let journal = self.device.journal();
        assert!(journal.violations.is_empty(), "{:?}", journal.violations);
        assert!(!self.machine.ioeventfds.violated.load(Ordering::Relaxed));
        let rung = self.machine.ioeventfds.addresses();
        if let Some(queues) = &journal.queues {
            assert!(bits[0] & status::DRIVER_OK != 0 && bits[0] & status::FEATURES_OK != 0);
            let doorbells = queues
                .iter()
                .filter_map(|queue| Some(bar? + 0x1000 + 4 * u64::from(queue.index)));
            assert_eq!(rung, doorbells.collect::<Vec<_>>());
        }
        if bits[0] & status::DRIVER_OK == 0 || bar.is_none() {
            assert!(rung.is_empty(), "{rung:x?}");
        }
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let mut rig = Rig::new();
    for step in steps.iter().take(48) {
        rig.apply(step);
        rig.check();
    }
    rig.device.journal().fail = None;
    rig.machine.pci.resume();
    rig.reboot();
    rig.machine.bar = WINDOW;
    rig.machine.start();
    assert_eq!(
        (rig.machine.status(), rig.device.journal().queues.is_some()),
        (0xf, true)
    );
});
