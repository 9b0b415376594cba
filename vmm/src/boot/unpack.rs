//! Unpacks a bzImage before the guest starts, in place of the kernel's own decompressor.
//!
//! The decompressor copies the packed kernel out of its way and unpacks it, on the one vCPU that runs and in memory
//! that the host has not backed yet. When the VMM unpacks the kernel, the guest starts in the kernel proper. Formats
//! without a memory-safe decoder as fast as the kernel's are left to the decompressor.

use std::num::NonZero;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use linux_loader::loader::bootparam::setup_header;

/// Magic number of LZ4's legacy frame, which Linux uses: blocks of [`LZ4_BLOCK`] bytes, each after its packed length.
const LZ4_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
const LZ4_BLOCK: usize = 8 << 20;
/// Most threads: a kernel has about seven blocks.
const THREADS_MAX: usize = 8;

/// Range of the packed kernel in `low`, which is guest memory from address 0, if the bzImage loaded at `load` has one
/// in the format of [`lz4`]. `header` is the bzImage's.
pub(super) fn payload(low: &[u8], load: u64, header: &setup_header) -> Option<Range<usize>> {
    let start = usize::try_from(load)
        .ok()?
        .checked_add(header.payload_offset as usize)?;
    let range = start..start.checked_add(header.payload_length as usize)?;
    low.get(range.clone())?.starts_with(&LZ4_MAGIC).then_some(range)
}

/// Unpacked size, which Linux's build appends to a payload.
pub(super) fn unpacked_size(payload: &[u8]) -> Option<usize> {
    let (_, size) = payload.split_last_chunk()?;
    Some(u32::from_le_bytes(*size) as usize)
}

/// Unpacks into `out`, which has [`unpacked_size`] bytes. Returns `None` if the result has another size. Blocks are
/// independent of each other: one thread for each processor unpacks them.
pub(super) fn lz4(payload: &[u8], out: &mut [u8]) -> Option<()> {
    let mut rest = payload.strip_prefix(&LZ4_MAGIC)?;
    let mut blocks = Vec::new();
    let mut outputs = out.chunks_mut(LZ4_BLOCK);
    while rest.len() > 4 {
        let (len, next) = rest.split_first_chunk()?;
        let (block, next) = next.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        blocks.push((block, outputs.next()?));
        rest = next;
    }
    if outputs.next().is_some() {
        return None;
    }
    let threads = thread::available_parallelism()
        .map_or(1, NonZero::get)
        .clamp(1, THREADS_MAX);
    let queue = Mutex::new(blocks.into_iter());
    let work = || {
        loop {
            let block = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((block, out)) = block else { return true };
            if lz4_flex::block::decompress_into(block, out).ok() != Some(out.len()) {
                return false;
            }
        }
    };
    let done = thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mine = work();
        helpers.into_iter().all(|h| h.join().unwrap_or(false)) && mine
    });
    done.then_some(())
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `vmlinux` packed as Linux's build does.
    pub fn pack(vmlinux: &[u8]) -> Vec<u8> {
        let mut payload = LZ4_MAGIC.to_vec();
        for block in vmlinux.chunks(LZ4_BLOCK) {
            let packed = lz4_flex::block::compress(block);
            payload.extend((packed.len() as u32).to_le_bytes());
            payload.extend(packed);
        }
        payload.extend((vmlinux.len() as u32).to_le_bytes());
        payload
    }

    #[test]
    fn packed_bytes_are_unpacked() {
        let vmlinux: Vec<u8> = (0..20_000_000u32).map(|i| (i / 777) as u8).collect();
        let packed = pack(&vmlinux);
        assert_eq!(unpacked_size(&packed), Some(vmlinux.len()));
        let mut out = vec![0; vmlinux.len()];
        lz4(&packed, &mut out).unwrap();
        assert!(out == vmlinux);
        for cut in [packed.len() - 5, packed.len() / 2, 7, 0] {
            assert!(lz4(&packed[..cut], &mut out).is_none(), "{cut}");
        }
        assert!(lz4(&packed, &mut vec![0; vmlinux.len() - 1]).is_none());
        assert!(lz4(&packed, &mut vec![0; vmlinux.len() + 1]).is_none());
    }

    #[test]
    fn a_payload_outside_memory_is_none() {
        let mut low = vec![0; 100];
        low[50..54].copy_from_slice(&LZ4_MAGIC);
        let header = |payload_offset, payload_length| setup_header {
            payload_offset,
            payload_length,
            ..Default::default()
        };
        assert_eq!(payload(&low, 40, &header(10, 20)), Some(50..70));
        for (offset, length) in [(11, 20), (10, 51), (u32::MAX, 1), (10, u32::MAX), (10, 3)] {
            assert_eq!(payload(&low, 40, &header(offset, length)), None);
        }
        assert_eq!(payload(&low, u64::MAX, &header(10, 20)), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn damage_stays_within_the_output(flips in prop::collection::vec((0usize..4000, any::<u8>()), 1..8)) {
            let mut packed = pack(&[7; 50_000]);
            for (at, value) in flips {
                let at = at % packed.len();
                packed[at] = value;
            }
            let _ = lz4(&packed, &mut [0; 50_000]);
        }
    }
}
