//! Compressed layers: gzip members and zstd frames, also skippable ones, whole or damaged. Asserts that whole ones give
//! what was compressed.
#![no_main]

use std::io::Read;

use arbitrary::Arbitrary;
use husk_fuzz::host::{Splice, splice};
use husk_fuzz::oci::{gzip, zstd};
use husk_volumes::decompress;
use libfuzzer_sys::fuzz_target;

/// Most bytes that are read.
const LIMIT: u64 = 4 << 20;

#[derive(Arbitrary, Debug)]
struct Program {
    stream: Stream,
    damage: Vec<Splice>,
    /// Bytes of one read.
    step: u16,
}

#[derive(Arbitrary, Debug)]
enum Stream {
    Gzip(Vec<Vec<u8>>),
    Zstd(Vec<Frame>),
    Plain(Vec<u8>),
    /// The magic number of a format, then these bytes.
    Raw(u8, Vec<u8>),
}

#[derive(Arbitrary, Debug)]
enum Frame {
    Data(Vec<u8>),
    Skippable(u8, Vec<u8>),
}

fuzz_target!(|program: Program| {
    let (mut packed, plain) = match &program.stream {
        Stream::Gzip(members) => {
            let members = &members[..members.len().min(4)];
            (
                members.iter().flat_map(|member| gzip(member)).collect::<Vec<_>>(),
                Some(members.concat()),
            )
        }
        Stream::Zstd(frames) => {
            let (mut packed, mut plain) = (Vec::new(), Vec::new());
            for frame in frames.iter().take(4) {
                match frame {
                    Frame::Data(data) => {
                        packed.extend(zstd(data));
                        plain.extend(data);
                    }
                    Frame::Skippable(kind, data) => {
                        packed.extend([0x50 | kind & 15, 0x2a, 0x4d, 0x18]);
                        packed.extend((data.len() as u32).to_le_bytes());
                        packed.extend(data);
                    }
                }
            }
            (packed, Some(plain))
        }
        Stream::Plain(data) => {
            let plain = !matches!(data[..], [0x1f, 0x8b, ..] | [0x28, 0xb5, ..] | [0x50..=0x5f, ..]);
            (data.clone(), plain.then(|| data.clone()))
        }
        Stream::Raw(format, data) => {
            let magic = [
                &[0x1f, 0x8b, 8][..],
                &[0x28, 0xb5, 0x2f, 0xfd],
                &[0x50, 0x2a, 0x4d, 0x18],
            ];
            ([magic[usize::from(*format) % 3], data].concat(), None)
        }
    };
    splice(&mut packed, &program.damage);
    let Ok(layer) = decompress(&packed[..]) else {
        return;
    };
    let mut layer = layer.take(LIMIT);
    let mut unpacked: Vec<u8> = Vec::new();
    let mut buffer = vec![0; usize::from(program.step).max(1)];
    let failed = loop {
        match layer.read(&mut buffer) {
            Ok(0) => break false,
            Ok(read) => unpacked.extend(&buffer[..read]),
            Err(_) => break true,
        }
    };
    if let Some(plain) = plain
        && program.damage.is_empty()
    {
        assert!(!failed && unpacked == plain, "other data than was compressed");
    }
});
