//! Guest memory as readv and writev take it.

use husk_devices::GuestMemMmap;
use husk_devices::virtio::chain::Segment;
use vm_memory::bitmap::Bitmap;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend};

/// What one readv or writev takes at most, with one slice of our own.
pub(crate) const MAX_SLICES: usize = 1023;

/// Calls `each` with the pieces of `segment` that are contiguous on the host too. None if not all of it is memory.
pub(crate) fn pieces(
    mem: &GuestMemMmap,
    segment: Segment,
    mut each: impl FnMut(GuestAddress, libc::iovec),
) -> Option<()> {
    let mut address = segment.address;
    for slice in GuestMemoryBackend::get_slices(mem, segment.address, segment.len as usize) {
        let slice = slice.ok()?;
        let iov_base = slice.ptr_guard_mut().as_ptr().cast();
        let iov_len = slice.len();
        each(address, libc::iovec { iov_base, iov_len });
        address = address.checked_add(iov_len as u64)?;
    }
    Some(())
}

/// Notes in the dirty bitmap that the kernel filled `len` bytes at `address`.
pub(crate) fn mark_dirty(mem: &GuestMemMmap, address: GuestAddress, len: usize) {
    for slice in GuestMemoryBackend::get_slices(mem, address, len).map_while(Result::ok) {
        slice.bitmap().mark_dirty(0, slice.len());
    }
}

#[cfg(test)]
mod tests {
    use husk_devices::virtio::testing::memory;
    use vm_memory::GuestAddressSpace;

    use super::*;

    #[test]
    fn a_segment_over_two_regions_is_two_pieces() {
        let mem = memory(&[(0, 0x1000), (0x1000, 0x1000)]);
        let find = |address, len| {
            let mut found = Vec::new();
            let segment = Segment {
                address: GuestAddress(address),
                len,
            };
            let all = pieces(&mem.memory(), segment, |at, piece| {
                found.push((at.0, piece.iov_len))
            });
            all.map(|()| found)
        };
        assert_eq!(find(0xffe, 4), Some(vec![(0xffe, 2), (0x1000, 2)]));
        assert_eq!(find(0x1fff, 2), None);
        assert_eq!(find(u64::MAX, 2), None);
    }
}
