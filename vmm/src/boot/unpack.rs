//! Unpacks a bzImage before the guest starts, in place of the kernel's own decompressor.
//!
//! The decompressor copies the packed kernel out of its way and unpacks it, on the one vCPU that runs and in memory
//! that the host has not backed yet. When the VMM unpacks the kernel, the guest starts in the kernel proper.
//!
//! zstd is left to the kernel's decompressor: ruzstd executes about three times its instructions. So are bzip2, LZMA
//! and LZO, which distributions hardly use.

use std::io::Read;
use std::num::NonZero;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use flate2::bufread::GzDecoder;
use linux_loader::loader::bootparam::setup_header;
use lzma_rust2::XzReader;

/// A format of Linux's build (scripts/Makefile.lib).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Gzip,
    /// LZ4's legacy frame: blocks of [`LZ4_BLOCK`] bytes, each after its packed length.
    Lz4,
    Xz,
}

const MAGICS: [(Format, &[u8]); 3] = [
    (Format::Gzip, &[0x1f, 0x8b, 0x08]),
    (Format::Lz4, &LZ4_MAGIC),
    (Format::Xz, b"\xfd7zXZ\0"),
];

const LZ4_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
const LZ4_BLOCK: usize = 8 << 20;
/// Most threads: a kernel has about seven blocks.
const THREADS_MAX: usize = 8;
/// Most memory of the decoder of xz, in KiB. Linux's build uses a dictionary of 32 MiB, since 6.12 of 128 MiB.
const XZ_MEMORY_KIB: u32 = 160 << 10;

impl Format {
    fn of(payload: &[u8]) -> Option<Self> {
        let (format, _) = MAGICS.iter().find(|(_, magic)| payload.starts_with(magic))?;
        Some(*format)
    }
}

/// Range of the packed kernel in `low`, which is guest memory from address 0, if the bzImage loaded at `load` has one
/// in a known format. `header` is the bzImage's.
pub(super) fn payload(low: &[u8], load: u64, header: &setup_header) -> Option<Range<usize>> {
    let start = usize::try_from(load)
        .ok()?
        .checked_add(header.payload_offset as usize)?;
    let range = start..start.checked_add(header.payload_length as usize)?;
    Format::of(low.get(range.clone())?)?;
    Some(range)
}

/// Unpacked size, which Linux's build appends to a payload. A gzip file ends with it anyway.
pub(super) fn unpacked_size(payload: &[u8]) -> Option<usize> {
    let (_, size) = payload.split_last_chunk()?;
    Some(u32::from_le_bytes(*size) as usize)
}

/// Unpacks into `out`, which has [`unpacked_size`] bytes. Returns `None` if the result has another size, or the payload
/// is damaged.
pub(super) fn unpack(payload: &[u8], out: &mut [u8]) -> Option<()> {
    let (stream, _size) = payload.split_last_chunk::<4>()?;
    match Format::of(payload)? {
        Format::Gzip => exactly(GzDecoder::new(payload), out),
        Format::Lz4 => lz4(payload, out),
        Format::Xz => exactly(XzReader::new_mem_limit(stream, false, XZ_MEMORY_KIB), out),
    }
}

/// Fills `out`, which the stream must end with: there decoders check what they have read.
fn exactly(mut decoder: impl Read, out: &mut [u8]) -> Option<()> {
    decoder.read_exact(out).ok()?;
    (decoder.read(&mut [0]).ok()? == 0).then_some(())
}

/// Blocks are independent of each other: one thread for each processor unpacks them.
fn lz4(payload: &[u8], out: &mut [u8]) -> Option<()> {
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
        // Where no thread can be made, as at the limit of processes, those there are do the work.
        let helpers: Vec<_> = (1..threads)
            .map_while(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        let mine = work();
        helpers.into_iter().all(|h| h.join().unwrap_or(false)) && mine
    });
    done.then_some(())
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use lzma_rust2::{XzOptions, XzWriter};
    use proptest::prelude::*;

    use super::*;

    /// `vmlinux` packed with LZ4 as Linux's build does.
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

    /// Bytes packed in each format as Linux's build does: with their size at the end.
    fn packed(bytes: &[u8]) -> [Vec<u8>; 3] {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gzip.write_all(bytes).unwrap();
        let mut options = XzOptions::with_preset(1);
        options.set_check_sum_type(lzma_rust2::CheckType::Crc32);
        options.prepend_pre_filter(lzma_rust2::filter::FilterType::BcjX86, 0);
        let mut xz = XzWriter::new(Vec::new(), options).unwrap();
        xz.write_all(bytes).unwrap();
        let mut xz = xz.finish().unwrap();
        xz.extend((bytes.len() as u32).to_le_bytes());
        [pack(bytes), gzip.finish().unwrap(), xz]
    }

    #[test]
    fn packed_bytes_are_unpacked() {
        let vmlinux: Vec<u8> = (0..20_000_000u32).map(|i| (i / 777) as u8).collect();
        for packed in packed(&vmlinux) {
            let format = Format::of(&packed);
            assert_eq!(unpacked_size(&packed), Some(vmlinux.len()), "{format:?}");
            let mut out = vec![0; vmlinux.len()];
            assert!(
                unpack(&packed, &mut out).is_some() && out == vmlinux,
                "{format:?}"
            );
            for cut in [packed.len() - 5, packed.len() / 2, 7, 0] {
                assert!(unpack(&packed[..cut], &mut out).is_none(), "{format:?} {cut}");
            }
            for size in [vmlinux.len() - 1, vmlinux.len() + 1] {
                assert!(unpack(&packed, &mut vec![0; size]).is_none(), "{format:?} {size}");
            }
            let mut damaged = packed.clone();
            damaged[packed.len() / 2] ^= 0x10;
            let unpacked = unpack(&damaged, &mut out);
            // LZ4's frame has no checksum.
            assert!(unpacked.is_none() || format == Some(Format::Lz4), "{format:?}");
        }
    }

    #[test]
    fn bytes_are_unpacked_without_threads() {
        let test = concat!(module_path!(), "::packed_bytes_are_unpacked");
        let (_crate, test) = test.split_once("::").unwrap();
        // No thread has room for a stack of this size.
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--test-threads=1"])
            .env("RUST_MIN_STACK", (1usize << 62).to_string())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    #[test]
    fn a_large_dictionary_is_refused() {
        let mut packed = packed(&[7; 50_000]);
        let xz = &mut packed[2];
        assert!(unpack(xz, &mut [0; 50_000]).is_some());
        // Of the block's header: flags, BCJ with its size, LZMA2 with its size and property; then zeros and a checksum.
        let header = 12..12 + 4 * (usize::from(xz[12]) + 1);
        let lzma2 = header.start
            + 2
            + xz[header.clone()][2..]
                .windows(2)
                .position(|w| w == [0x21, 1])
                .unwrap();
        // 2^31 bytes.
        xz[lzma2 + 2] = 38;
        let sum = crc32(&xz[header.start..header.end - 4]).to_le_bytes();
        xz[header.end - 4..header.end].copy_from_slice(&sum);
        assert!(unpack(xz, &mut [0; 50_000]).is_none());
    }

    fn crc32(bytes: &[u8]) -> u32 {
        let mut crc = flate2::Crc::new();
        crc.update(bytes);
        crc.sum()
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
            for mut packed in packed(&[7; 50_000]) {
                for (at, value) in &flips {
                    let at = at % packed.len();
                    packed[at] = *value;
                }
                let _ = unpack(&packed, &mut [0; 50_000]);
            }
        }
    }
}
