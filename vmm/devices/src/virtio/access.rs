//! Access to ranges of guest memory.
//!
//! Nearly every range that a driver names lies in one memory region. These functions then search the regions once; the
//! accessors of vm-memory build an iterator over the regions first, which takes several times as long as the search.

use vm_memory::bitmap::{AtomicBitmap, BS};
use vm_memory::{GuestAddress, GuestMemoryBackend, VolatileSlice};

use crate::GuestMemMmap;

/// Guest memory within one region. The guest may access it at any time.
pub type GuestSlice<'a> = VolatileSlice<'a, BS<'a, AtomicBitmap>>;

/// A range, or a part of it, is not guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a buffer outside of guest memory")]
pub struct OutsideMemory;

/// Calls `each` with the slices of the `len` bytes from `address` on, in order: several if the range spans regions, none
/// if it is empty.
///
/// # Errors
/// Part of the range is not guest memory. `each` may have been called for the part before it.
pub fn slices<'a>(
    mem: &'a GuestMemMmap,
    address: GuestAddress,
    len: usize,
    mut each: impl FnMut(GuestSlice<'a>),
) -> Result<(), OutsideMemory> {
    if len == 0 {
        return Ok(());
    }
    if let Ok(slice) = mem.get_slice(address, len) {
        each(slice);
        return Ok(());
    }
    for slice in GuestMemoryBackend::get_slices(mem, address, len) {
        each(slice.map_err(|_| OutsideMemory)?);
    }
    Ok(())
}

/// Fills `bytes` from guest memory.
///
/// # Errors
/// Part of the range is not guest memory. The bytes before it may have been read.
pub fn read(mem: &GuestMemMmap, address: GuestAddress, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
    let mut done = 0;
    slices(mem, address, bytes.len(), |slice| {
        done += slice.copy_to(&mut bytes[done..]);
    })
}

/// Writes `bytes` to guest memory, and marks its pages dirty.
///
/// # Errors
/// Part of the range is not guest memory. The bytes before it may have been written.
pub fn write(mem: &GuestMemMmap, address: GuestAddress, bytes: &[u8]) -> Result<(), OutsideMemory> {
    let mut rest = bytes;
    slices(mem, address, bytes.len(), |slice| {
        slice.copy_from(rest);
        rest = &rest[slice.len()..];
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::bitmap::Bitmap;
    use vm_memory::{Bytes, GuestAddressSpace, GuestMemoryRegion};

    use super::*;
    use crate::virtio::testing::memory;

    const PAGE: usize = 0x1000;
    /// Bytes of each of the two regions.
    const REGION: usize = 4 * PAGE;

    proptest! {
        /// Both functions do what those of vm-memory do: in a region, across two, and at a hole between them.
        #[test]
        fn accesses_are_those_of_vm_memory(address in 0..9 * PAGE as u64, len in 0..5 * PAGE, hole: bool) {
            let second = REGION as u64 + u64::from(hole) * 0x100;
            let regions = [(0, REGION), (second, REGION)];
            let (mem, expected) = (memory(&regions), memory(&regions));
            let (mem, expected) = (mem.memory(), expected.memory());
            let pattern: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            let written = write(&mem, GuestAddress(address), &pattern).is_ok();
            prop_assert_eq!(written, expected.write_slice(&pattern, GuestAddress(address)).is_ok());
            let (mut got, mut all) = (vec![0; len], vec![0; len]);
            let read = read(&mem, GuestAddress(address), &mut got).is_ok();
            prop_assert_eq!(read, expected.read_slice(&mut all, GuestAddress(address)).is_ok());
            if written {
                prop_assert_eq!((&got, &all), (&pattern, &pattern));
                for (region, other) in mem.iter().zip(expected.iter()) {
                    for page in (0..REGION).step_by(PAGE) {
                        prop_assert_eq!(region.bitmap().dirty_at(page), other.bitmap().dirty_at(page));
                    }
                }
            }
        }
    }
}
