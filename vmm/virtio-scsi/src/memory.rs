//! Data-out and data-in buffers: lists of unchecked segments of guest memory.

use husk_devices::GuestMemMmap;
use husk_devices::virtio::access::{self, OutsideMemory};
use husk_devices::virtio::chain::Segment;
use husk_devices::virtio::dma::joined_host_ranges;
use husk_disk::IoBuffer;
use vm_memory::GuestAddress;

/// Total length of `segments` in bytes.
pub(crate) fn len(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// The segments of at most `len` bytes from `offset` on.
pub(crate) fn part(segments: &[Segment], offset: u64, len: u64) -> impl Iterator<Item = Segment> + '_ {
    let (mut skip, mut left) = (offset, len);
    segments.iter().filter_map(move |segment| {
        let size = u64::from(segment.len);
        if skip >= size {
            skip -= size;
            return None;
        }
        let start = std::mem::take(&mut skip);
        let taken = (size - start).min(left);
        left -= taken;
        // If this wraps, there is no memory at the result.
        let address = GuestAddress(segment.address.0.wrapping_add(start));
        (taken > 0).then_some(Segment {
            address,
            len: taken as u32,
        })
    })
}

/// Fills `bytes` from the segments, from `offset` on.
pub(crate) fn read(
    mem: &GuestMemMmap,
    segments: &[Segment],
    offset: u64,
    bytes: &mut [u8],
) -> Result<(), OutsideMemory> {
    let mut rest = &mut *bytes;
    for segment in part(segments, offset, rest.len() as u64) {
        let (now, later) = rest.split_at_mut(segment.len as usize);
        access::read(mem, segment.address, now)?;
        rest = later;
    }
    if rest.is_empty() {
        Ok(())
    } else {
        Err(OutsideMemory)
    }
}

/// Writes `bytes` to the segments, from `offset` on and as far as they fit. Returns the number of bytes written.
pub(crate) fn write(
    mem: &GuestMemMmap,
    segments: &[Segment],
    offset: u64,
    bytes: &[u8],
) -> Result<usize, OutsideMemory> {
    let mut rest = bytes;
    for segment in part(segments, offset, bytes.len() as u64) {
        let (now, later) = rest.split_at(segment.len as usize);
        access::write(mem, segment.address, now)?;
        rest = later;
    }
    Ok(bytes.len() - rest.len())
}

/// A data-out or data-in buffer: the bytes of a chain's segments behind its header or response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataBuffer<'a> {
    segments: &'a [Segment],
    /// First byte of the buffer in the segments.
    start: u64,
}

impl<'a> DataBuffer<'a> {
    pub fn new(segments: &'a [Segment], start: u64) -> Self {
        Self { segments, start }
    }

    /// The segments of at most `len` bytes from `offset` on.
    pub fn part(self, offset: u64, len: u64) -> impl Iterator<Item = Segment> + 'a {
        // What the sum does not express is behind any chain.
        part(self.segments, self.start.saturating_add(offset), len)
    }

    /// As [`read`].
    pub fn read(self, mem: &GuestMemMmap, offset: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        read(mem, self.segments, self.start.saturating_add(offset), bytes)
    }

    /// As [`write`], from the first byte on.
    pub fn write(self, mem: &GuestMemMmap, bytes: &[u8]) -> Result<usize, OutsideMemory> {
        write(mem, self.segments, self.start, bytes)
    }

    /// Host addresses of `len` bytes from `offset` on. Adjacent buffers are merged.
    pub fn map(
        self,
        mem: &GuestMemMmap,
        offset: u64,
        len: u64,
        buffers: &mut Vec<IoBuffer>,
    ) -> Result<(), OutsideMemory> {
        buffers.clear();
        let mut mapped = 0;
        joined_host_ranges(mem, self.part(offset, len), |range| {
            mapped += range.len as u64;
            buffers.push(IoBuffer::new(range.start, range.len));
        })?;
        if mapped == len { Ok(()) } else { Err(OutsideMemory) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddressSpace};

    use super::*;

    const SIZE: usize = 4096;

    fn guest() -> std::sync::Arc<GuestMemMmap> {
        let mem = husk_devices::virtio::testing::memory(&[(0, SIZE)])
            .memory()
            .into_inner();
        let content: Vec<_> = (0..SIZE).map(|i| (i % 251) as u8).collect();
        mem.write_slice(&content, GuestAddress(0)).unwrap();
        mem
    }

    fn segments() -> impl Strategy<Value = Vec<Segment>> {
        let segment = (0..SIZE as u64, 0..200u32).prop_map(|(at, len)| Segment {
            address: GuestAddress(at.min(SIZE as u64 - u64::from(len))),
            len,
        });
        vec(segment, 0..6)
    }

    fn content(mem: &GuestMemMmap, segments: &[Segment]) -> Vec<u8> {
        let mut all = Vec::new();
        for segment in segments {
            let mut bytes = vec![0; segment.len as usize];
            mem.read_slice(&mut bytes, segment.address).unwrap();
            all.extend(bytes);
        }
        all
    }

    proptest! {
        #[test]
        fn slices_match_the_same_range_of_all_segments(
            list in segments(),
            (start, offset) in (0..700u64, 0..700u64),
            len in 0..700u64,
        ) {
            let mem = guest();
            let whole = content(&mem, &list);
            let fits = offset + len <= whole.len() as u64;
            let mut bytes = vec![0; len as usize];
            let outcome = read(&mem, &list, offset, &mut bytes);
            prop_assert_eq!(outcome.is_ok(), fits || len == 0);
            let mut buffers = Vec::new();
            let buffer = DataBuffer::new(&list, start.min(offset));
            let mapped = buffer.map(&mem, offset - start.min(offset), len, &mut buffers);
            prop_assert_eq!(mapped.is_ok(), fits || len == 0);
            if fits {
                let expected = &whole[offset as usize..][..len as usize];
                prop_assert_eq!(&bytes, expected);
                // SAFETY: the buffers are slices of `mem`, which nothing writes in the meantime.
                let seen: Vec<u8> = buffers
                    .iter()
                    .flat_map(|b| unsafe { std::slice::from_raw_parts(b.start(), b.len()) }.to_vec())
                    .collect();
                prop_assert_eq!(&seen, expected);
            }
            let parts: Vec<_> = buffer.part(offset - start.min(offset), len).collect();
            let (from, to) = (offset.min(whole.len() as u64), (offset + len).min(whole.len() as u64));
            prop_assert_eq!(content(&mem, &parts), &whole[from as usize..to as usize]);
        }

        #[test]
        fn segments_outside_memory_are_an_error(at in any::<u64>(), len in any::<u32>()) {
            let mem = guest();
            let list = [Segment { address: GuestAddress(at), len }];
            let inside = at.checked_add(len.into()).is_some_and(|end| end <= SIZE as u64);
            let mut buffers = Vec::new();
            let mapped = DataBuffer::new(&list, 0).map(&mem, 0, len.into(), &mut buffers);
            prop_assert_eq!(mapped.is_ok(), inside || len == 0);
        }
    }

    #[test]
    fn a_write_fills_the_segments_and_no_more() {
        let mem = guest();
        let list = [(0, 3), (10, 0), (100, 2)].map(|(at, len)| Segment {
            address: GuestAddress(at),
            len,
        });
        assert_eq!(write(&mem, &list, 0, b"abcdefg"), Ok(5));
        assert_eq!(content(&mem, &list), b"abcde");
        assert_eq!(write(&mem, &list, 2, b"xy"), Ok(2));
        assert_eq!(content(&mem, &list), b"abxye");
        assert_eq!(write(&mem, &list, 5, b"z"), Ok(0));
    }
}
