//! Feeds table accesses, message control, interrupts and saved tables to the vectors of a function. Asserts that a
//! vector is routed to its entry's message exactly while it may fire, and that every interrupt is delivered, pending, or
//! dropped because MSI-X is off.

#![no_main]

use arbitrary::Arbitrary;
use husk_devices::msi::MsiMessage;
use husk_devices::pci::Msix;
use husk_devices::pci::fake::{FakeMsi, UNROUTABLE};
use husk_devices::pci::msix::{ENTRY_SIZE, MsixEntryState};
use husk_fuzz::accesses::Data;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    /// A whole entry.
    Program {
        vector: u8,
        unroutable: bool,
        data: u32,
        masked: bool,
    },
    Write {
        offset: Offset,
        data: Data,
    },
    Read {
        offset: Offset,
        data: Data,
    },
    Pending {
        offset: Offset,
        data: Data,
    },
    Control(u16),
    Enable {
        masked: bool,
    },
    Signal(u8),
    Trigger(u8),
    Reset,
    Load {
        control: u16,
        entries: Vec<(u64, u32, bool, bool)>,
    },
    Reload,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Offset {
    Near(u8),
    Any(u64),
}

impl Offset {
    fn byte(self) -> u64 {
        match self {
            Self::Near(at) => at.into(),
            Self::Any(at) => at,
        }
    }
}

const VECTORS: u16 = 4;
const ENABLE: u16 = 1 << 15;
const FUNCTION_MASK: u16 = 1 << 14;

fn check(msix: &Msix, msi: &FakeMsi, control: u16) {
    let mut pending = [0; 8];
    msix.read_pending(0, &mut pending);
    for (vector, entry) in msix.save().iter().enumerate() {
        let open =
            control & (ENABLE | FUNCTION_MASK) == ENABLE && !entry.masked && entry.address != UNROUTABLE;
        let message = MsiMessage {
            address: entry.address,
            data: entry.data,
        };
        assert_eq!(
            msi.line(vector).routed(),
            open.then_some(message),
            "vector {vector}"
        );
        assert!(!(open && entry.pending), "vector {vector} is open and pending");
        assert!(
            !entry.pending || control & ENABLE != 0,
            "vector {vector} is pending while MSI-X is off"
        );
        assert_eq!(u64::from_le_bytes(pending) >> vector & 1 == 1, entry.pending);
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let msi = FakeMsi::default();
    let msix = Msix::new(VECTORS, &msi).expect("eventfds");
    let mut control = 0;
    for step in steps.into_iter().take(64) {
        match step {
            Step::Program {
                vector,
                unroutable,
                data,
                masked,
            } => {
                let entry = u64::from(vector % 5) * ENTRY_SIZE;
                let address = if unroutable { UNROUTABLE } else { 0xfee0_0000 };
                msix.write_table(entry, &address.to_le_bytes());
                msix.write_table(entry + 8, &data.to_le_bytes());
                msix.write_table(entry + 12, &u32::from(masked).to_le_bytes());
            }
            Step::Write { offset, data } => msix.write_table(offset.byte(), &data.bytes(8)),
            Step::Read { offset, data } => msix.read_table(offset.byte(), &mut data.bytes(8)),
            Step::Pending { offset, data } => msix.read_pending(offset.byte() % 0x1000, &mut data.bytes(8)),
            Step::Control(value) => {
                control = value;
                msix.set_control(control);
            }
            Step::Enable { masked } => {
                control = ENABLE | if masked { FUNCTION_MASK } else { 0 };
                msix.set_control(control);
            }
            Step::Signal(vector) => {
                let vector = u16::from(vector % 5);
                (0..VECTORS).for_each(|line| _ = msi.line(line.into()).fired());
                let taken = msix.signal(vector);
                assert_eq!(taken, vector < VECTORS && control & ENABLE != 0);
                if taken {
                    let pending = msix.save()[usize::from(vector)].pending;
                    assert_eq!(
                        msi.line(vector.into()).fired() == 1,
                        !pending,
                        "delivered or pending"
                    );
                }
                assert!(
                    (0..VECTORS).all(|line| msi.line(line.into()).fired() == 0),
                    "another vector fired"
                );
            }
            Step::Trigger(vector) => {
                assert_eq!(
                    msix.trigger((vector % 5).into()).is_some(),
                    u16::from(vector % 5) < VECTORS
                );
            }
            Step::Reset => {
                msix.reset();
                control = 0;
            }
            Step::Load {
                control: new,
                entries,
            } => {
                let entries = entries
                    .into_iter()
                    .map(|(address, data, masked, pending)| MsixEntryState {
                        address,
                        data,
                        masked,
                        // No save has pending bits while MSI-X is off.
                        pending: pending && new & ENABLE != 0,
                    });
                let entries: Vec<_> = entries.collect();
                // What became pending since stays so, also in a table that is off.
                let kept = msix.save().iter().any(|entry| entry.pending);
                if !(kept && new & ENABLE == 0) {
                    let fits = msix.load(new, &entries);
                    assert_eq!(fits, entries.len() == usize::from(VECTORS));
                    control = if fits { new } else { control };
                }
            }
            Step::Reload => {
                let saved = msix.save();
                msix.reset();
                assert!(msix.load(control, &saved));
                assert_eq!(msix.save(), saved);
            }
        }
        check(&msix, &msi, control);
    }
});
