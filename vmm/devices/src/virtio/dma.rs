//! Guest memory that the host kernel reads or writes for a device (DMA).
//!
//! vm-memory marks pages dirty when this process writes them through it. It does not see what the kernel writes
//! through an iovec (a read of a disk or of a tap), so a device holds a [`DmaMapping`] for as long as the kernel may
//! write.

use std::ops::Deref;

use vm_memory::GuestAddress;
use vm_memory::bitmap::Bitmap;

use super::access::{self, OutsideMemory};
use super::chain::Segment;
use crate::GuestMemMmap;

/// Contiguous guest memory as this process and the kernel address it.
///
/// Valid while the guest memory it was found in stays mapped. The guest may access it at any time.
#[derive(Clone, Copy, Debug)]
pub struct HostRange {
    /// First byte.
    pub start: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

impl From<HostRange> for libc::iovec {
    fn from(range: HostRange) -> Self {
        Self {
            iov_base: range.start.cast(),
            iov_len: range.len,
        }
    }
}

/// Calls `each` with the host ranges of `segment` in order, and with the guest address of each. A segment that spans
/// memory regions has several; an empty one has none.
///
/// # Errors
/// Part of the segment is not guest memory. `each` may have been called for the part before it.
pub fn host_ranges(
    mem: &GuestMemMmap,
    segment: Segment,
    mut each: impl FnMut(GuestAddress, HostRange),
) -> Result<(), OutsideMemory> {
    let mut address = segment.address;
    access::slices(mem, segment.address, segment.len as usize, |slice| {
        let (start, len) = (slice.ptr_guard_mut().as_ptr(), slice.len());
        each(address, HostRange { start, len });
        // The end of the last slice is the end of memory at most.
        address = GuestAddress(address.0.wrapping_add(len as u64));
    })
}

/// Calls `each` with the host ranges of all `segments` in order, with neighbours joined into one range.
///
/// # Errors
/// As [`host_ranges`].
pub fn joined_host_ranges(
    mem: &GuestMemMmap,
    segments: impl IntoIterator<Item = Segment>,
    mut each: impl FnMut(HostRange),
) -> Result<(), OutsideMemory> {
    let mut last: Option<HostRange> = None;
    for segment in segments {
        host_ranges(mem, segment, |_, range| match &mut last {
            Some(last) if last.start.wrapping_add(last.len) == range.start => last.len += range.len,
            last => {
                if let Some(complete) = last.replace(range) {
                    each(complete);
                }
            }
        })?;
    }
    if let Some(complete) = last {
        each(complete);
    }
    Ok(())
}

/// Segments of guest memory that the kernel accesses for a device.
///
/// On drop, also while a panic unwinds, it marks the pages dirty that the device may have written. `M` keeps the
/// memory mapped: an `Arc` for a request that outlives the caller, a reference for a system call. The mapping is
/// dropped before the driver sees the buffers as used, and after the kernel has finished with them.
#[derive(Debug)]
pub struct DmaMapping<M, S>
where
    M: Deref<Target = GuestMemMmap>,
    S: AsRef<[Segment]>,
{
    /// None after [`DmaMapping::finish`].
    parts: Option<(M, S)>,
    /// Bytes from the start of the segments that the device may have written.
    written: u64,
}

impl<M, S> DmaMapping<M, S>
where
    M: Deref<Target = GuestMemMmap>,
    S: AsRef<[Segment]>,
{
    fn new(mem: M, segments: S, written: u64) -> Self {
        Self {
            parts: Some((mem, segments)),
            written,
        }
    }

    /// A mapping of device-readable segments. Marks nothing.
    pub fn readable(mem: M, segments: S) -> Self {
        Self::new(mem, segments, 0)
    }

    /// A mapping of device-writable segments. Marks all of them unless [`DmaMapping::set_written`] is called.
    pub fn writable(mem: M, segments: S) -> Self {
        Self::new(mem, segments, u64::MAX)
    }

    /// Limits what is marked to the first `bytes` bytes of the segments: the kernel wrote no others.
    pub fn set_written(&mut self, bytes: u64) {
        self.written = self.written.min(bytes);
    }

    /// Calls `each` with the host ranges of the segments in order, with neighbours joined into one range.
    ///
    /// # Errors
    /// As [`host_ranges`].
    pub fn host_ranges(&self, each: impl FnMut(HostRange)) -> Result<(), OutsideMemory> {
        match &self.parts {
            Some((mem, segments)) => joined_host_ranges(mem, segments.as_ref().iter().copied(), each),
            None => Ok(()),
        }
    }

    /// Marks the pages now, and returns the memory and the segments for reuse.
    pub fn finish(mut self) -> (M, S) {
        self.mark_dirty();
        self.parts.take().expect("emptied only here, by value")
    }

    fn mark_dirty(&self) {
        let Some((mem, segments)) = &self.parts else {
            return;
        };
        let mut left = self.written;
        for segment in segments.as_ref() {
            let len = left.min(segment.len.into());
            left -= len;
            // A range outside of memory has no pages; the kernel was never given it.
            let _ = access::slices(mem, segment.address, len as usize, |slice| {
                slice.bitmap().mark_dirty(0, slice.len());
            });
            if left == 0 {
                break;
            }
        }
    }
}

impl<M, S> Drop for DmaMapping<M, S>
where
    M: Deref<Target = GuestMemMmap>,
    S: AsRef<[Segment]>,
{
    fn drop(&mut self) {
        self.mark_dirty();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use proptest::prelude::*;
    use vm_memory::{Address, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

    use super::*;
    use crate::virtio::testing::memory;

    const PAGE: u64 = 4096;
    const PAGES: u64 = 16;

    /// Two regions of 8 pages without a hole between them.
    fn guest() -> Arc<GuestMemMmap> {
        let half = (PAGES / 2 * PAGE) as usize;
        memory(&[(0, half), (half as u64, half)]).memory().into_inner()
    }

    fn segments(list: &[(u64, u32)]) -> Vec<Segment> {
        let segment = |&(address, len)| Segment {
            address: GuestAddress(address),
            len,
        };
        list.iter().map(segment).collect()
    }

    fn dirty(mem: &GuestMemMmap) -> Vec<u64> {
        let is_dirty = |page: &u64| {
            let (region, offset) = mem.to_region_addr(GuestAddress(page * PAGE)).unwrap();
            region.bitmap().dirty_at(offset.raw_value() as usize)
        };
        (0..PAGES).filter(is_dirty).collect()
    }

    #[test]
    fn written_pages_are_dirty_after_drop_and_not_before() {
        let mem = guest();
        let mapping = DmaMapping::writable(Arc::clone(&mem), segments(&[(PAGE + 4095, 2), (5 * PAGE, 1)]));
        assert!(dirty(&mem).is_empty());
        drop(mapping);
        assert_eq!(dirty(&mem), [1, 2, 5]);
    }

    #[test]
    fn readable_segments_are_never_dirty() {
        let mem = guest();
        let list = segments(&[(0, 0x4000)]);
        let mut mapping = DmaMapping::readable(&*mem, &list);
        mapping.set_written(0x4000);
        drop(mapping);
        assert!(dirty(&mem).is_empty());
    }

    #[test]
    fn only_the_bytes_written_are_dirty() {
        for (bytes, expected) in [
            (0, &[][..]),
            (1, &[0]),
            (PAGE, &[0]),
            (PAGE + 1, &[0, 9]),
            (u64::MAX, &[0, 9, 10]),
        ] {
            let mem = guest();
            let list = segments(&[(0, PAGE as u32), (9 * PAGE, 2 * PAGE as u32)]);
            let mut mapping = DmaMapping::writable(&*mem, &list);
            mapping.set_written(bytes);
            mapping.set_written(u64::MAX);
            drop(mapping);
            assert_eq!(dirty(&mem), expected, "{bytes}");
        }
    }

    #[test]
    fn a_panic_leaves_the_pages_dirty() {
        let mem = guest();
        let list = segments(&[(3 * PAGE, 10)]);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _mapping = DmaMapping::writable(&*mem, &list);
            panic!("in the system call");
        }));
        assert!(outcome.is_err());
        assert_eq!(dirty(&mem), [3]);
    }

    #[test]
    fn finishing_marks_segments_dirty_and_returns_them() {
        let mem = guest();
        let list = segments(&[(7 * PAGE, 2 * PAGE as u32)]);
        let (same, returned) = DmaMapping::writable(Arc::clone(&mem), list.clone()).finish();
        assert!(Arc::ptr_eq(&same, &mem));
        assert_eq!((returned, dirty(&mem)), (list, vec![7, 8]));
    }

    #[test]
    fn a_segment_over_two_regions_is_two_ranges() {
        let mem = guest();
        let find = |address, len| {
            let mut found = Vec::new();
            let segment = segments(&[(address, len)])[0];
            host_ranges(&mem, segment, |at, range| found.push((at.0, range.len))).map(|()| found)
        };
        assert_eq!(find(0x7ffe, 4), Ok(vec![(0x7ffe, 2), (0x8000, 2)]));
        assert_eq!(find(0x7ffe, 0), Ok(vec![]));
        assert_eq!(find(0xffff, 2), Err(OutsideMemory));
        assert_eq!(find(u64::MAX, 2), Err(OutsideMemory));
    }

    #[test]
    fn neighbours_are_one_range() {
        let mem = guest();
        let list = segments(&[(0x100, 0x10), (0x110, 0), (0x110, 0x20), (0x200, 8)]);
        let mut lengths = Vec::new();
        let mapping = DmaMapping::readable(&*mem, &list);
        mapping.host_ranges(|range| lengths.push(range.len)).unwrap();
        assert_eq!(lengths, [0x30, 8]);
    }

    #[test]
    fn segments_outside_memory_are_an_error_and_mark_nothing() {
        let mem = guest();
        let list = segments(&[(PAGE, 1), (PAGES * PAGE - 1, 2), (u64::MAX, 9)]);
        let mapping = DmaMapping::writable(&*mem, &list);
        assert_eq!(mapping.host_ranges(|_| {}), Err(OutsideMemory));
        drop(mapping);
        assert!(dirty(&mem).contains(&1));
    }

    proptest! {
        #[test]
        fn exactly_the_written_pages_are_dirty(
            list in prop::collection::vec((0..PAGES * PAGE, 0..3 * PAGE), 0..6),
            written: prop::sample::Index,
        ) {
            let mem = guest();
            let end = PAGES * PAGE;
            let list: Vec<_> = list.iter().map(|&(at, len)| (at, len.min(end - at) as u32)).collect();
            let total: u64 = list.iter().map(|(_, len)| u64::from(*len)).sum();
            let mut left = written.index(total as usize + 1) as u64;
            let list = segments(&list);
            let mut mapping = DmaMapping::writable(&*mem, &list);
            mapping.set_written(left);
            let mut mapped = 0;
            mapping.host_ranges(|range| mapped += range.len as u64).unwrap();
            prop_assert_eq!(mapped, total);
            drop(mapping);
            let mut expected = std::collections::BTreeSet::new();
            for segment in &list {
                let len = left.min(segment.len.into());
                left -= len;
                expected.extend((0..len).map(|i| (segment.address.0 + i) / PAGE));
            }
            prop_assert_eq!(dirty(&mem), expected.into_iter().collect::<Vec<_>>());
        }
    }
}
