//! Unpacks the payloads of kernels in all formats: packed here and then damaged, and any bytes behind a magic number.
//! Asserts that an undamaged payload gives what was packed.

#![no_main]

use std::io::Write;

use arbitrary::Arbitrary;
use flate2::Compression;
use flate2::write::GzEncoder;
use husk_vmm::boot::testing::unpack;
use libfuzzer_sys::fuzz_target;
use lzma_rust2::filter::FilterType;
use lzma_rust2::{CheckType, XzOptions, XzWriter};

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    payload: Payload<'a>,
    /// Distance of the unpacked size from that of the text.
    size: i8,
}

#[derive(Arbitrary, Debug)]
enum Payload<'a> {
    Packed {
        format: Format,
        text: &'a [u8],
        /// Times that the text is repeated.
        times: u8,
        damage: Vec<(u16, u8)>,
    },
    Bytes {
        format: Format,
        bytes: &'a [u8],
        size: u16,
    },
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Format {
    Gzip,
    Lz4,
    Xz,
}

fn magic(format: Format) -> &'static [u8] {
    match format {
        Format::Gzip => &[0x1f, 0x8b, 0x08],
        Format::Lz4 => &[0x02, 0x21, 0x4c, 0x18],
        Format::Xz => b"\xfd7zXZ\0",
    }
}

/// The payload of a kernel, as Linux's build makes it.
fn pack(format: Format, text: &[u8]) -> Vec<u8> {
    let mut payload = match format {
        Format::Gzip => {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            gzip.write_all(text).expect("memory");
            return gzip.finish().expect("memory");
        }
        Format::Lz4 => {
            // One block of literals.
            let mut block = vec![(text.len().min(15) << 4) as u8];
            if let Some(mut rest) = text.len().checked_sub(15) {
                while rest >= 255 {
                    block.push(255);
                    rest -= 255;
                }
                block.push(rest as u8);
            }
            block.extend(text);
            [magic(format), &(block.len() as u32).to_le_bytes(), &block].concat()
        }
        Format::Xz => {
            let mut options = XzOptions::with_preset(0);
            options.lzma_options.dict_size = 1 << 16;
            options.set_check_sum_type(CheckType::Crc32);
            options.prepend_pre_filter(FilterType::BcjX86, 0);
            let mut xz = XzWriter::new(Vec::new(), options).expect("an encoder");
            xz.write_all(text).expect("memory");
            xz.finish().expect("memory")
        }
    };
    payload.extend((text.len() as u32).to_le_bytes());
    payload
}

fuzz_target!(|input: Input<'_>| {
    match input.payload {
        Payload::Packed {
            format,
            text,
            times,
            damage,
        } => {
            let text = text[..text.len().min(512)].repeat(usize::from(times % 16) + 1);
            let mut payload = pack(format, &text);
            let mut damaged = false;
            for (at, byte) in damage.iter().take(6) {
                let at = usize::from(*at) % payload.len();
                damaged |= payload[at] != *byte;
                payload[at] = *byte;
            }
            let size = text.len().saturating_add_signed(input.size.into());
            let mut out = vec![0; size];
            let unpacked = unpack(&payload, &mut out);
            if !damaged && !text.is_empty() {
                assert_eq!(unpacked.is_some(), size == text.len(), "{format:?}");
                assert!(unpacked.is_none() || out == text, "{format:?}: other bytes");
            }
        }
        Payload::Bytes { format, bytes, size } => {
            let payload = [magic(format), &bytes[..bytes.len().min(4096)]].concat();
            let _ = unpack(&payload, &mut vec![0; size.into()]);
        }
    }
});
