//! MSI-X: the vector table, the pending bits and the capability (PCI 3.0, section 6.8.2).
//!
//! Vectors are allocated when the table is made, so that running out is an error of adding the device and
//! not of its driver. A vector is routed while it can fire: function enabled and unmasked, entry unmasked.

use std::sync::{Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use crate::msi::{MsiAllocator, MsiMessage, MsiVector};

/// Bytes of a table entry.
pub const ENTRY_SIZE: u64 = 16;
/// The most vectors a function may have (message control, table size: 11 bits).
pub const MAX_VECTORS: u16 = 2048;
/// Capability ID.
pub const CAPABILITY: u8 = 0x11;
/// Writable bits of the capability's body: enable and function mask in message control.
pub const CAPABILITY_MASK: [u8; 2] = [0, 0xc0];

const CONTROL_ENABLE: u16 = 1 << 15;
const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
const ENTRY_MASKED: u32 = 1;

/// A function's vectors. Interrupts are signalled from any thread; the lock is per vector and never held
/// over anything but the vector's own routing.
pub struct Msix {
    vectors: Box<[Vector]>,
}

impl std::fmt::Debug for Msix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Msix").field("entries", &self.save()).finish()
    }
}

struct Vector {
    interrupt: Box<dyn MsiVector>,
    entry: Mutex<Entry>,
}

/// A table entry as a snapshot keeps it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct MsixEntryState {
    /// Message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
    /// Mask bit of vector control.
    pub masked: bool,
    /// Pending bit.
    pub pending: bool,
}

const AT_RESET: MsixEntryState = MsixEntryState {
    address: 0,
    data: 0,
    masked: true,
    pending: false,
};

#[derive(Debug)]
struct Entry {
    state: MsixEntryState,
    /// The function's enable and mask bits, kept here so that one lock decides whether to fire.
    enabled: bool,
    function_masked: bool,
    routed: Option<MsiMessage>,
}

impl Vector {
    fn entry(&self) -> MutexGuard<'_, Entry> {
        self.entry.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Updates the route to the entry and delivers a pending interrupt.
    fn update_route(&self, entry: &mut Entry) {
        let open = entry.enabled && !entry.function_masked && !entry.state.masked;
        let message = MsiMessage {
            address: entry.state.address,
            data: entry.state.data,
        };
        let wanted = open.then_some(message);
        if wanted != entry.routed {
            match self.interrupt.route(wanted) {
                Ok(()) => entry.routed = wanted,
                // The guest chooses the message and may choose one that cannot be routed.
                Err(error) => {
                    tracing::debug!(%error, ?wanted, "MSI-X message refused");
                    let unrouted = self.interrupt.route(None).is_ok();
                    entry.routed = entry.routed.filter(|_| !unrouted);
                }
            }
        }
        if entry.state.pending && entry.routed.is_some() {
            self.fire(entry);
        }
    }

    fn fire(&self, entry: &mut Entry) {
        // A full counter means that an interrupt is already pending.
        let _ = self.interrupt.trigger().write(1);
        entry.state.pending = false;
    }
}

impl Msix {
    /// A table of `vectors` masked entries.
    pub fn new(vectors: u16, allocator: &dyn MsiAllocator) -> std::io::Result<Self> {
        let vector = |_| {
            let entry = Entry {
                state: AT_RESET,
                enabled: false,
                function_masked: false,
                routed: None,
            };
            Ok(Vector {
                interrupt: allocator.allocate()?,
                entry: Mutex::new(entry),
            })
        };
        Ok(Self {
            vectors: (0..vectors.min(MAX_VECTORS))
                .map(vector)
                .collect::<std::io::Result<_>>()?,
        })
    }

    /// The capability's body: message control, then table and pending-bit array as offsets into one BAR.
    /// Both offsets are multiples of 8.
    pub fn capability(&self, bar: u8, table: u32, pending: u32) -> [u8; 10] {
        let mut body = [0; 10];
        body[..2].copy_from_slice(&(self.len().saturating_sub(1)).to_le_bytes());
        body[2..6].copy_from_slice(&(table | u32::from(bar)).to_le_bytes());
        body[6..].copy_from_slice(&(pending | u32::from(bar)).to_le_bytes());
        body
    }

    /// Number of vectors.
    pub fn len(&self) -> u16 {
        // At most MAX_VECTORS.
        self.vectors.len() as u16
    }

    /// True if there are no vectors.
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Applies the message control register after the guest wrote configuration space.
    pub fn set_control(&self, control: u16) {
        let (enabled, masked) = (
            control & CONTROL_ENABLE != 0,
            control & CONTROL_FUNCTION_MASK != 0,
        );
        for vector in &self.vectors {
            let mut entry = vector.entry();
            if (entry.enabled, entry.function_masked) != (enabled, masked) {
                (entry.enabled, entry.function_masked) = (enabled, masked);
                entry.state.pending &= enabled;
                vector.update_route(&mut entry);
            }
        }
    }

    /// Raises a vector, or sets its pending bit while it is masked. Returns false, with no effect, if there is no
    /// such vector or MSI-X is disabled.
    pub fn signal(&self, vector: u16) -> bool {
        let Some(vector) = self.vectors.get(usize::from(vector)) else {
            return false;
        };
        let mut entry = vector.entry();
        if entry.routed.is_some() {
            vector.fire(&mut entry);
        } else {
            entry.state.pending = entry.enabled;
        }
        entry.enabled
    }

    /// The eventfd of a vector, for a signaller outside this process. The interrupt controller reads it while the
    /// vector is routed, including a signal from before.
    pub fn trigger(&self, vector: u16) -> Option<EventFd> {
        self.vectors
            .get(usize::from(vector))?
            .interrupt
            .trigger()
            .try_clone()
            .ok()
    }

    /// A guest read of the table. Only aligned dwords and qwords are defined (section 6.8.2).
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        let Some((vector, first)) = self.locate(offset, data.len()) else {
            return data.fill(0xff);
        };
        let MsixEntryState {
            address,
            data: message,
            masked,
            ..
        } = vector.entry().state;
        let mut bytes = [0; ENTRY_SIZE as usize];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&message.to_le_bytes());
        bytes[12] = u8::from(masked);
        data.copy_from_slice(&bytes[first..first + data.len()]);
    }

    /// A guest write to the table, of the same widths; others are ignored.
    pub fn write_table(&self, offset: u64, data: &[u8]) {
        let Some((vector, first)) = self.locate(offset, data.len()) else {
            return;
        };
        let mut entry = vector.entry();
        for (dword, value) in (first / 4..).zip(data.as_chunks().0) {
            let value = u32::from_le_bytes(*value);
            let state = &mut entry.state;
            match dword {
                0 => state.address = state.address >> 32 << 32 | u64::from(value),
                1 => state.address = u64::from(value) << 32 | state.address & u64::from(u32::MAX),
                2 => state.data = value,
                _ => state.masked = value & ENTRY_MASKED != 0,
            }
        }
        vector.update_route(&mut entry);
    }

    /// A guest read of the pending bits: one per vector, in qwords. Writes have no effect.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            let bit = |i: u64| {
                let vector = usize::try_from(at * 8 + i).ok().and_then(|v| self.vectors.get(v));
                u8::from(vector.is_some_and(|v| v.entry().state.pending)) << i
            };
            *byte = (0..8).map(bit).fold(0, |bits, bit| bits | bit);
        }
    }

    /// Resets the table and the enable bits.
    pub fn reset(&self) {
        for vector in &self.vectors {
            let mut entry = vector.entry();
            entry.state = AT_RESET;
            (entry.enabled, entry.function_masked) = (false, false);
            vector.update_route(&mut entry);
        }
    }

    /// The table, for a snapshot.
    pub fn save(&self) -> Vec<MsixEntryState> {
        self.vectors.iter().map(|v| v.entry().state).collect()
    }

    /// Restores a saved table and message control. An interrupt that became pending since stays pending. Returns
    /// false, with no change, if the table has another size.
    pub fn load(&self, control: u16, entries: &[MsixEntryState]) -> bool {
        if entries.len() != self.vectors.len() {
            return false;
        }
        for (vector, state) in self.vectors.iter().zip(entries) {
            let mut entry = vector.entry();
            let pending = entry.state.pending | state.pending;
            entry.state = MsixEntryState { pending, ..*state };
            entry.enabled = control & CONTROL_ENABLE != 0;
            entry.function_masked = control & CONTROL_FUNCTION_MASK != 0;
            vector.update_route(&mut entry);
        }
        true
    }

    /// The entry of an aligned dword or qword access, and its first byte in the entry.
    fn locate(&self, offset: u64, len: usize) -> Option<(&Vector, usize)> {
        if !matches!(len, 4 | 8) || !offset.is_multiple_of(len as u64) {
            return None;
        }
        let vector = self.vectors.get(usize::try_from(offset / ENTRY_SIZE).ok()?)?;
        Some((vector, (offset % ENTRY_SIZE) as usize))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::fake::{FakeMsi, UNROUTABLE};
    use super::*;

    const ENABLED: u16 = CONTROL_ENABLE;
    const MASKED: u16 = CONTROL_ENABLE | CONTROL_FUNCTION_MASK;
    const MESSAGE: MsiMessage = MsiMessage {
        address: 0xfee0_1000,
        data: 0x4021,
    };

    fn table(vectors: u16) -> (Msix, FakeMsi) {
        let msi = FakeMsi::default();
        (Msix::new(vectors, &msi).unwrap(), msi)
    }

    fn program(msix: &Msix, vector: u64, message: MsiMessage, masked: u32) {
        let entry = vector * ENTRY_SIZE;
        msix.write_table(entry, &(message.address as u32).to_le_bytes());
        msix.write_table(entry + 4, &((message.address >> 32) as u32).to_le_bytes());
        msix.write_table(entry + 8, &message.data.to_le_bytes());
        msix.write_table(entry + 12, &masked.to_le_bytes());
    }

    fn pending(msix: &Msix) -> u64 {
        let mut bits = [0; 8];
        msix.read_pending(0, &mut bits);
        u64::from_le_bytes(bits)
    }

    #[test]
    fn the_capability_describes_table_and_pending_bits() {
        // PCI 3.0, section 6.8.2.3: table size is N - 1; the low three bits of the offsets are the BAR.
        let (msix, _) = table(3);
        assert_eq!(
            msix.capability(2, 0x2000, 0x3000),
            [2, 0, 0x02, 0x20, 0, 0, 0x02, 0x30, 0, 0]
        );
    }

    #[test]
    fn entries_are_masked_at_power_on_and_read_back() {
        // Section 6.8.2.9: the mask bit's state after reset is 1.
        let (msix, _) = table(2);
        let mut qword = [0; 8];
        msix.read_table(8, &mut qword);
        assert_eq!(u64::from_le_bytes(qword), 1 << 32);
        msix.write_table(16, &0x1_fee0_1000_u64.to_le_bytes());
        msix.write_table(24, &0xffff_fffe_0000_4021_u64.to_le_bytes());
        let mut dwords = [[0; 4]; 4];
        (0..)
            .zip(&mut dwords)
            .for_each(|(i, dword)| msix.read_table(16 + 4 * i, dword));
        assert_eq!(dwords.map(u32::from_le_bytes), [0xfee0_1000, 1, 0x4021, 0]);
        msix.read_table(0, &mut qword);
        assert_eq!(qword, [0; 8], "the neighbour is untouched");
    }

    #[test]
    fn odd_widths_and_offsets_are_ignored() {
        let (msix, _) = table(1);
        let before = msix.save();
        for (offset, len) in [
            (0, 1),
            (0, 2),
            (2, 4),
            (4, 8),
            (1, 4),
            (16, 4),
            (u64::MAX - 3, 4),
            (0, 0),
        ] {
            msix.write_table(offset, &[0x55; 8][..len]);
            let mut data = vec![0; len];
            msix.read_table(offset, &mut data);
            assert_eq!(data, vec![0xff; len]);
        }
        assert_eq!(msix.save(), before);
    }

    #[test]
    fn a_vector_is_routed_while_nothing_masks_it() {
        let (msix, msi) = table(1);
        let line = msi.line(0);
        program(&msix, 0, MESSAGE, 0);
        assert_eq!(line.routed(), None, "MSI-X is disabled");
        msix.set_control(MASKED);
        assert_eq!(line.routed(), None, "the function is masked");
        msix.set_control(ENABLED);
        assert_eq!(line.routed(), Some(MESSAGE));
        assert!(msix.signal(0));
        assert_eq!(line.fired(), 1);
        msix.write_table(12, &[1, 0, 0, 0]);
        assert_eq!(line.routed(), None, "the entry is masked");
        msix.write_table(12, &[0; 4]);
        let other = MsiMessage {
            data: 0x4022,
            ..MESSAGE
        };
        msix.write_table(8, &other.data.to_le_bytes());
        assert_eq!(line.routed(), Some(other));
        msix.set_control(0);
        assert_eq!(line.routed(), None);
        let routes = line.routes.lock().unwrap().len();
        msix.set_control(0);
        program(&msix, 0, MESSAGE, 1);
        assert_eq!(
            line.routes.lock().unwrap().len(),
            routes,
            "no routing without need"
        );
    }

    #[test]
    fn masked_interrupts_are_pending_and_delivered_once_when_unmasked() {
        // Section 6.8.2.10 and 6.8.3.4.
        let (msix, msi) = table(65);
        let line = msi.line(64);
        program(&msix, 64, MESSAGE, 1);
        msix.set_control(ENABLED);
        assert!(msix.signal(64) && msix.signal(64));
        assert_eq!((line.fired(), pending(&msix)), (0, 0));
        let mut byte = [0];
        msix.read_pending(8, &mut byte);
        assert_eq!(byte, [1]);
        msix.set_control(MASKED);
        msix.write_table(64 * 16 + 12, &[0; 4]);
        assert_eq!(line.fired(), 0, "the function mask still holds it");
        msix.set_control(ENABLED);
        assert_eq!(line.fired(), 1);
        msix.read_pending(8, &mut byte);
        assert_eq!(byte, [0]);
        msix.set_control(MASKED);
        msix.set_control(ENABLED);
        assert_eq!(line.fired(), 0, "once");
    }

    #[test]
    fn nothing_is_signalled_or_pending_while_disabled() {
        let (msix, msi) = table(1);
        program(&msix, 0, MESSAGE, 0);
        assert!(!msix.signal(0));
        assert_eq!(pending(&msix), 0);
        msix.set_control(MASKED);
        assert!(msix.signal(0));
        assert_eq!(pending(&msix), 1);
        msix.set_control(0);
        msix.set_control(ENABLED);
        assert_eq!(msi.line(0).fired(), 0);
        assert!(!msix.signal(7), "no such vector");
    }

    #[test]
    fn an_unroutable_message_loses_only_its_interrupts() {
        let (msix, msi) = table(2);
        msix.set_control(ENABLED);
        program(&msix, 0, MESSAGE, 0);
        program(
            &msix,
            0,
            MsiMessage {
                address: UNROUTABLE,
                data: 0,
            },
            0,
        );
        assert_eq!(
            msi.line(0).routed(),
            None,
            "the old message is not used for the new one"
        );
        msix.signal(0);
        assert_eq!((msi.line(0).fired(), pending(&msix)), (0, 1));
        program(&msix, 0, MESSAGE, 0);
        assert_eq!((msi.line(0).fired(), pending(&msix)), (1, 0));
    }

    #[test]
    fn reset_clears_tables_and_restore_sets_them() {
        let (msix, msi) = table(2);
        msix.set_control(ENABLED);
        program(&msix, 0, MESSAGE, 0);
        program(&msix, 1, MESSAGE, 1);
        msix.signal(1);
        let saved = msix.save();
        msix.reset();
        assert_eq!(msix.save(), [AT_RESET; 2]);
        assert_eq!(msi.line(0).routed(), None);
        assert!(!msix.signal(0));
        assert!(!msix.load(ENABLED, &saved[..1]), "another size");
        assert!(msix.load(ENABLED, &saved));
        assert_eq!(msix.save(), saved);
        assert_eq!(msi.line(0).routed(), Some(MESSAGE));
        program(&msix, 1, MESSAGE, 0);
        assert_eq!(msi.line(1).fired(), 1, "what was pending is not lost");
        program(&msix, 0, MESSAGE, 1);
        let saved = msix.save();
        msix.signal(0);
        assert!(msix.load(ENABLED, &saved));
        assert_eq!(pending(&msix), 1, "nor what became pending since");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write(u64, Vec<u8>),
        Control(u16),
        Signal(u16),
    }

    fn step() -> impl Strategy<Value = Step> {
        let widths = prop::sample::select(vec![1, 2, 4, 4, 4, 8]);
        let bytes =
            widths.prop_flat_map(|n| prop::collection::vec(prop::sample::select(vec![0, 1, 0xff]), n));
        prop_oneof![
            4 => (prop_oneof![(0..20_u64).prop_map(|dword| dword * 4), any::<u64>()], bytes)
                .prop_map(|(offset, data)| Step::Write(offset, data)),
            1 => prop::sample::select(vec![0, ENABLED, MASKED, 0xffff]).prop_map(Step::Control),
            2 => (0..5_u16).prop_map(Step::Signal),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

        /// After any guest accesses, a vector is routed exactly while it may fire, never with another message than
        /// its entry's, and every interrupt is delivered, pending, or dropped because disabled.
        #[test]
        fn routes_agree_with_the_table(steps in prop::collection::vec(step(), 0..60)) {
            let (msix, msi) = table(4);
            let mut control = 0;
            for step in steps {
                match step {
                    Step::Write(offset, data) => msix.write_table(offset, &data),
                    Step::Control(value) => {
                        control = value;
                        msix.set_control(value);
                    }
                    Step::Signal(vector) => {
                        (0..4).for_each(|i| _ = msi.line(i).fired());
                        msix.signal(vector);
                        if control & CONTROL_ENABLE != 0 && vector < 4 {
                            let pending = msix.save()[usize::from(vector)].pending;
                            prop_assert!((msi.line(usize::from(vector)).fired() == 1) != pending);
                        }
                    }
                }
                for (i, entry) in msix.save().iter().enumerate() {
                    let open = control & MASKED == ENABLED && !entry.masked;
                    let message = MsiMessage { address: entry.address, data: entry.data };
                    prop_assert_eq!(msi.line(i).routed(), open.then_some(message));
                    prop_assert!(!(open && entry.pending));
                }
            }
        }
    }
}
