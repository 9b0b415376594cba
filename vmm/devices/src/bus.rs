//! Address-decoded dispatch of port I/O and MMIO accesses to devices.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

/// A device that answers accesses to one or more address ranges of a [`Bus`].
///
/// Called from any vCPU thread; a device guards its own state. `offset` is relative to the range's
/// start. `data` is 1, 2, 4 or 8 bytes (PIO: 1, 2 or 4) and wholly inside the range.
pub trait BusDevice: Send + Sync {
    /// Fills `data` with the result of a guest read.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Handles a guest write of `data`.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Errors of adding a range to a bus.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BusError {
    /// The range is empty or runs past the end of the address space.
    #[error("range {start:#x}+{len:#x} is empty or wraps")]
    Invalid {
        /// First address.
        start: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Another device already answers part of the range.
    #[error("range {start:#x}+{len:#x} overlaps one already in use")]
    Overlap {
        /// First address.
        start: u64,
        /// Length in bytes.
        len: u64,
    },
}

#[derive(Clone)]
struct Range {
    len: u64,
    device: Arc<dyn BusDevice>,
}

/// One address space (port I/O or MMIO). Reads of unclaimed addresses return all ones.
#[derive(Default)]
pub struct Bus {
    ranges: RwLock<BTreeMap<u64, Range>>,
}

impl std::fmt::Debug for Bus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ranges = self.ranges.read().unwrap_or_else(|e| e.into_inner());
        f.debug_map()
            .entries(ranges.iter().map(|(start, r)| (start, r.len)))
            .finish()
    }
}

impl Bus {
    /// An empty address space.
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps `[start, start + len)` to `device`.
    ///
    /// # Errors
    /// The range is empty, wraps, or overlaps another one.
    pub fn insert(&self, start: u64, len: u64, device: Arc<dyn BusDevice>) -> Result<(), BusError> {
        let last = match len.checked_sub(1).and_then(|l| start.checked_add(l)) {
            Some(last) => last,
            None => return Err(BusError::Invalid { start, len }),
        };
        let mut ranges = self.ranges.write().unwrap_or_else(|e| e.into_inner());
        let below = ranges.range(..=last).next_back();
        if below.is_some_and(|(s, r)| s + (r.len - 1) >= start) {
            return Err(BusError::Overlap { start, len });
        }
        ranges.insert(start, Range { len, device });
        Ok(())
    }

    /// Removes the range that starts at `start`. Returns false if there is none.
    pub fn remove(&self, start: u64) -> bool {
        self.ranges
            .write()
            .unwrap_or_else(|e| e.into_inner())
            .remove(&start)
            .is_some()
    }

    fn find(&self, addr: u64, len: usize) -> Option<(u64, Arc<dyn BusDevice>)> {
        let ranges = self.ranges.read().unwrap_or_else(|e| e.into_inner());
        let (start, range) = ranges.range(..=addr).next_back()?;
        let offset = addr - start;
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= range.len);
        inside.then(|| (offset, range.device.clone()))
    }

    /// Performs a guest read. Returns true if a device answered; otherwise `data` is all ones.
    pub fn read(&self, addr: u64, data: &mut [u8]) -> bool {
        match self.find(addr, data.len()) {
            Some((offset, device)) => {
                device.read(offset, data);
                true
            }
            None => {
                data.fill(0xff);
                false
            }
        }
    }

    /// Performs a guest write. Returns true if a device handled it.
    pub fn write(&self, addr: u64, data: &[u8]) -> bool {
        match self.find(addr, data.len()) {
            Some((offset, device)) => {
                device.write(offset, data);
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    #[test]
    fn accesses_reach_the_device_at_its_offset_and_nothing_else() {
        let bus = Bus::new();
        let device = Arc::new(Recorder::default());
        bus.insert(0x3f8, 8, device.clone()).unwrap();
        let mut byte = [0];
        assert!(bus.read(0x3fd, &mut byte));
        assert_eq!(byte, [5]);
        assert!(!bus.read(0x400, &mut byte));
        assert_eq!(byte, [0xff]);
        assert!(
            !bus.write(0x3ff, &[1, 2]),
            "an access that straddles the end is not the device's"
        );
        assert!(bus.write(0x3f8, b"h"));
        assert_eq!(*device.0.lock().unwrap(), [(0, b"h".to_vec())]);
    }

    #[test]
    fn ranges_never_overlap_and_can_be_reused_once_removed() {
        let bus = Bus::new();
        let device = || Arc::new(Recorder::default());
        bus.insert(0x1000, 0x1000, device()).unwrap();
        for (start, len) in [(0xfff, 2), (0x1fff, 1), (0x0, 0x4000), (0x1800, 8)] {
            assert_eq!(
                bus.insert(start, len, device()),
                Err(BusError::Overlap { start, len })
            );
        }
        assert!(matches!(
            bus.insert(u64::MAX, 2, device()),
            Err(BusError::Invalid { .. })
        ));
        assert!(matches!(
            bus.insert(5, 0, device()),
            Err(BusError::Invalid { .. })
        ));
        assert!(bus.remove(0x1000));
        assert!(!bus.remove(0x1000));
        bus.insert(0x1800, 8, device()).unwrap();
    }
}
