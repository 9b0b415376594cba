//! The ELF kernel in a bzImage.

use anyhow::{Context, Result, ensure};
use std::io::Read;
use std::ops::Range;

/// Offsets in the boot protocol's header of the numbers that locate the packed kernel.
const SETUP_SECTS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// Length of the unpacked size that follows a packed kernel.
const SIZE_LEN: usize = 4;
/// Magic number of LZ4's legacy frame, and the length of what one of its blocks unpacks to.
const LZ4: &[u8] = &[0x02, 0x21, 0x4c, 0x18];
const LZ4_BLOCK: usize = 8 << 20;
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];

/// Range of the packed kernel in a bzImage. Its size when it is unpacked follows, in four bytes.
fn packed(image: &[u8]) -> Result<Range<usize>> {
    let number = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("the kernel is no bzImage")?;
        Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
    };
    let setup = match image.get(SETUP_SECTS).context("the kernel is no bzImage")? {
        0 => 4,
        sectors => usize::from(*sectors),
    };
    let start = (setup + 1) * 512 + number(PAYLOAD_OFFSET)?;
    let len = number(PAYLOAD_LENGTH)?;
    ensure!(len >= SIZE_LEN, "the bzImage has no kernel");
    ensure!(start + len <= image.len(), "the bzImage is cut off");
    Ok(start..start + len - SIZE_LEN)
}

/// A bzImage whose kernel is `xz`, packed as Linux's build does: `xz --check=crc32 --x86 --lzma2=dict=32MiB`. The
/// decompressor in it stays as it was, so only a VMM that unpacks the kernel can boot it.
pub fn with_xz(image: &[u8], xz: &[u8]) -> Result<Vec<u8>> {
    let range = packed(image)?;
    ensure!(xz.len() <= range.len(), "xz packs the kernel worse than it was");
    let payload = [xz, &image[range.end..][..SIZE_LEN]].concat();
    let mut image = image.to_vec();
    image[range.start..][..payload.len()].copy_from_slice(&payload);
    image[PAYLOAD_LENGTH..][..4].copy_from_slice(&u32::try_from(payload.len())?.to_le_bytes());
    Ok(image)
}

/// Unpacks a bzImage's kernel.
pub fn unpack(image: &[u8]) -> Result<Vec<u8>> {
    let range = packed(image)?;
    let size: [u8; SIZE_LEN] = image[range.end..][..SIZE_LEN].try_into()?;
    let (packed, size) = (&image[range], u32::from_le_bytes(size) as usize);
    let mut kernel = Vec::with_capacity(size);
    if let Some(blocks) = packed.strip_prefix(LZ4) {
        lz4(blocks, &mut kernel)?;
    } else if packed.starts_with(ZSTD) {
        ruzstd::decoding::StreamingDecoder::new(packed)?.read_to_end(&mut kernel)?;
    } else {
        ensure!(packed.starts_with(XZ), "the kernel is packed in another format");
        lzma_rust2::XzReader::new(packed, false).read_to_end(&mut kernel)?;
    }
    ensure!(
        kernel.len() == size && kernel.starts_with(b"\x7fELF"),
        "the kernel does not unpack to an ELF file of {size} bytes"
    );
    Ok(kernel)
}

/// Unpacks blocks that each follow their length.
fn lz4(mut blocks: &[u8], kernel: &mut Vec<u8>) -> Result<()> {
    while let Some((len, rest)) = blocks.split_first_chunk() {
        let (block, rest) = rest
            .split_at_checked(u32::from_le_bytes(*len) as usize)
            .context("a block is cut off")?;
        let start = kernel.len();
        kernel.resize(start + LZ4_BLOCK, 0);
        let len = lz4_flex::block::decompress_into(block, &mut kernel[start..])?;
        kernel.truncate(start + len);
        blocks = rest;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use lzma_rust2::{XzOptions, XzWriter};
    use std::io::Write;

    #[test]
    fn a_packed_kernel_is_found() {
        let kernel = [b"\x7fELF".as_slice(), &[7; 100]].concat();
        let block = lz4_flex::block::compress(&kernel);
        let mut payload = [LZ4, &(block.len() as u32).to_le_bytes(), &block].concat();
        payload.extend((kernel.len() as u32).to_le_bytes());
        let mut image = vec![0; 1024];
        image[SETUP_SECTS] = 1;
        image[PAYLOAD_OFFSET..][..4].copy_from_slice(&0_u32.to_le_bytes());
        image[PAYLOAD_LENGTH..][..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend(&payload);
        assert_eq!(unpack(&image).expect("a kernel"), kernel);
        let mut xz = XzWriter::new(Vec::new(), XzOptions::with_preset(0)).expect("options");
        xz.write_all(&kernel).expect("packed");
        let xz = xz.finish().expect("packed");
        assert!(with_xz(&image, &[0; 200]).is_err());
        image.splice(
            1024..,
            [&vec![0; 200][..], &(kernel.len() as u32).to_le_bytes()].concat(),
        );
        image[PAYLOAD_LENGTH..][..4].copy_from_slice(&204_u32.to_le_bytes());
        assert_eq!(
            unpack(&with_xz(&image, &xz).expect("it fits")).expect("a kernel"),
            kernel
        );
        assert!(unpack(&image[..image.len() - 1]).is_err());
        assert!(unpack(&[0; 100]).is_err());
    }
}
