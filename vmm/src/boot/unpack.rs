//! Unpacking a bzImage before the guest starts, in place of its own decompressor.
//!
//! The decompressor first copies the packed kernel out of its own way and then unpacks it, on the guest's
//! one running vCPU and in memory the host has yet to back. Done here, the guest begins in the kernel proper.
//! Formats without a memory-safe decoder as fast as the kernel's are left to the decompressor.

use linux_loader::loader::bootparam::setup_header;
use vm_memory::ByteValued;

/// Offset of the setup header in a bzImage (Documentation/arch/x86/boot.rst).
const HEADER: usize = 0x1f1;
const MAGIC: u32 = 0x5372_6448;
/// The first version in which payload and 64-bit entry point are both described.
const VERSION: u16 = 0x20c;
const XLF_KERNEL_64: u16 = 1;
/// An unpacked kernel that is larger is not one.
const UNPACKED_MAX: usize = 512 << 20;

/// LZ4's legacy frame, the one Linux uses: blocks of this size, each after its packed length.
const LZ4_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
const LZ4_BLOCK: usize = 8 << 20;

/// A bzImage's header and the ELF file (with what is appended to it) inside.
#[derive(Debug)]
pub(super) struct Unpacked {
    pub header: setup_header,
    pub vmlinux: Vec<u8>,
}

/// Unpacks `kernel`; none if it is not a bzImage, or one this cannot unpack.
pub(super) fn unpack(kernel: &[u8]) -> Option<Unpacked> {
    let header = kernel.get(HEADER..HEADER + size_of::<setup_header>())?;
    let mut copy = setup_header::default();
    copy.as_mut_slice().copy_from_slice(header);
    let header = copy;
    if header.header != MAGIC || header.version < VERSION || header.xloadflags & XLF_KERNEL_64 == 0 {
        return None;
    }
    let setup = match header.setup_sects {
        0 => 4,
        n => usize::from(n),
    };
    let start = (setup + 1) * 512 + header.payload_offset as usize;
    let payload = kernel.get(start..start.checked_add(header.payload_length as usize)?)?;
    let vmlinux = lz4(payload.strip_prefix(&LZ4_MAGIC)?)?;
    Some(Unpacked { header, vmlinux })
}

fn lz4(blocks: &[u8]) -> Option<Vec<u8>> {
    let mut out: Vec<u8> = Vec::new();
    let mut rest = blocks;
    // The kernel's build appends the unpacked size.
    while rest.len() > 4 {
        let (len, next) = rest.split_first_chunk()?;
        let (block, next) = next.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        let at = out.len();
        if at >= UNPACKED_MAX {
            return None;
        }
        out.resize(at + LZ4_BLOCK, 0);
        let written = lz4_flex::block::decompress_into(block, &mut out[at..]).ok()?;
        out.truncate(at + written);
        rest = next;
    }
    let size = u32::from_le_bytes(rest.try_into().ok()?);
    (size as usize == out.len()).then_some(out)
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A bzImage around `vmlinux`, packed as Linux's build does.
    pub fn bzimage(vmlinux: &[u8], mut header: setup_header) -> Vec<u8> {
        let mut payload = LZ4_MAGIC.to_vec();
        for block in vmlinux.chunks(LZ4_BLOCK) {
            let packed = lz4_flex::block::compress(block);
            payload.extend((packed.len() as u32).to_le_bytes());
            payload.extend(packed);
        }
        payload.extend((vmlinux.len() as u32).to_le_bytes());
        (header.header, header.version, header.setup_sects) = (MAGIC, 0x20f, 1);
        header.xloadflags |= XLF_KERNEL_64;
        (header.payload_offset, header.payload_length) = (16, payload.len() as u32);
        let mut image = vec![0; HEADER];
        image.extend(header.as_slice());
        image.resize(2 * 512 + 16, 0);
        image.extend(payload);
        image
    }

    #[test]
    fn what_was_packed_comes_out() {
        let vmlinux: Vec<u8> = (0..20_000_000u32).map(|i| (i / 777) as u8).collect();
        let image = bzimage(&vmlinux, setup_header::default());
        assert!(unpack(&image).unwrap().vmlinux == vmlinux);
        for cut in [image.len() - 1, image.len() / 2, 0x210, 0] {
            assert!(unpack(&image[..cut]).is_none(), "{cut}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn damage_is_noticed_or_harmless(flips in prop::collection::vec((0usize..4000, any::<u8>()), 1..8)) {
            let mut image = bzimage(&[7; 50_000], setup_header::default());
            for (at, value) in flips {
                let at = at % image.len();
                image[at] = value;
            }
            if let Some(unpacked) = unpack(&image) {
                prop_assert!(unpacked.vmlinux.len() <= UNPACKED_MAX);
            }
        }
    }
}
