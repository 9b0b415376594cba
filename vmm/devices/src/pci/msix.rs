//! MSI-X: the vector table, the pending bits and the capability (PCI 3.0, section 6.8.2).
//!
//! Vectors are allocated when the table is made, so that running out is an error of adding the device and
//! not of its driver. A vector is routed while it can fire: function enabled and unmasked, entry unmasked.

use std::sync::{Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

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
    line: Box<dyn MsiVector>,
    entry: Mutex<Entry>,
}

/// A table entry as a snapshot keeps it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct EntryState {
    /// Message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
    /// Mask bit of vector control.
    pub masked: bool,
    /// Pending bit.
    pub pending: bool,
}

const AT_RESET: EntryState = EntryState {
    address: 0,
    data: 0,
    masked: true,
    pending: false,
};

#[derive(Debug)]
struct Entry {
    state: EntryState,
    /// The function's enable and mask bits, kept here so that one lock decides whether to fire.
    enabled: bool,
    function_masked: bool,
    routed: Option<MsiMessage>,
}

impl Vector {
    fn entry(&self) -> MutexGuard<'_, Entry> {
        self.entry.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Makes the route agree with the entry and delivers what was held back.
    fn settle(&self, entry: &mut Entry) {
        let open = entry.enabled && !entry.function_masked && !entry.state.masked;
        let message = MsiMessage {
            address: entry.state.address,
            data: entry.state.data,
        };
        let wanted = open.then_some(message);
        if wanted != entry.routed {
            match self.line.route(wanted) {
                Ok(()) => entry.routed = wanted,
                // The guest chooses the message, and may choose one that cannot be routed.
                Err(error) => {
                    tracing::debug!(%error, ?wanted, "MSI-X message refused");
                    let unrouted = self.line.route(None).is_ok();
                    entry.routed = entry.routed.filter(|_| !unrouted);
                }
            }
        }
        if entry.state.pending && entry.routed.is_some() {
            self.fire(entry);
        }
    }

    fn fire(&self, entry: &mut Entry) {
        // A full counter means that an interrupt is on its way already.
        let _ = self.line.trigger().write(1);
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
                line: allocator.allocate()?,
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

    /// Whether there are no vectors.
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Takes the message control register after the guest wrote configuration space.
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
                vector.settle(&mut entry);
            }
        }
    }

    /// Raises a vector, or sets its pending bit while it is masked. Nothing happens while MSI-X is
    /// disabled; returns whether it is enabled.
    pub fn signal(&self, vector: u16) -> bool {
        let Some(vector) = self.vectors.get(usize::from(vector)) else {
            return true;
        };
        let mut entry = vector.entry();
        if entry.routed.is_some() {
            vector.fire(&mut entry);
        } else {
            entry.state.pending = entry.enabled;
        }
        entry.enabled
    }

    /// A guest read of the table. Only aligned dwords and qwords are defined (section 6.8.2).
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        let Some((vector, first)) = self.locate(offset, data.len()) else {
            return data.fill(0xff);
        };
        let EntryState {
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
        vector.settle(&mut entry);
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

    /// Disables, masks and forgets everything.
    pub fn reset(&self) {
        for vector in &self.vectors {
            let mut entry = vector.entry();
            entry.state = AT_RESET;
            (entry.enabled, entry.function_masked) = (false, false);
            vector.settle(&mut entry);
        }
    }

    /// The table, for a snapshot.
    pub fn save(&self) -> Vec<EntryState> {
        self.vectors.iter().map(|v| v.entry().state).collect()
    }

    /// Takes a saved table and message control. What became pending since stays pending. False, and
    /// nothing changed, if the table is of another size.
    pub fn load(&self, control: u16, entries: &[EntryState]) -> bool {
        if entries.len() != self.vectors.len() {
            return false;
        }
        for (vector, state) in self.vectors.iter().zip(entries) {
            let mut entry = vector.entry();
            let pending = entry.state.pending | state.pending;
            entry.state = EntryState { pending, ..*state };
            entry.enabled = control & CONTROL_ENABLE != 0;
            entry.function_masked = control & CONTROL_FUNCTION_MASK != 0;
            vector.settle(&mut entry);
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
