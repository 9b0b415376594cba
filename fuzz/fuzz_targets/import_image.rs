//! Images that a server sent: raw disks and qcow2 images, compressed or not, whole or damaged. Asserts that whole ones
//! become the disk that they contain, within the size and the room of the claim, and that no disk has another size than
//! was reported.
#![no_main]

#[path = "../../import/src/convert/format.rs"]
mod format;
#[allow(dead_code)]
#[path = "../../import/src/convert/image.rs"]
mod image;
#[allow(dead_code)]
#[path = "../../import/src/convert/report.rs"]
mod report;

use std::cell::Cell;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use arbitrary::Arbitrary;
use format::{Format, HEAD};
use husk_fuzz::host::{Splice, splice};
use husk_fuzz::images::{file, memfd};
use husk_fuzz::oci::{gzip, zstd};
use husk_fuzz::qcow2::{Edit, Image, Shape};
use image::{Limits, convert};
use libfuzzer_sys::fuzz_target;
use lzma_rust2::{XzOptions, XzWriter};
use report::{ConvertError, Converted};

const MIB: u64 = 1 << 20;

/// First bytes of formats.
const MAGIC: [&[u8]; 6] = [
    b"QFI\xfb\0\0\0\x03",
    &[0x1f, 0x8b, 8],
    &[0x28, 0xb5, 0x2f, 0xfd],
    b"\xfd7zXZ\0",
    b"KDMV",
    &[0x50, 0x2a, 0x4d, 0x18],
];

#[derive(Arbitrary, Debug)]
struct Program {
    content: Content,
    /// First bytes of another format.
    magic: Option<(u8, Vec<u8>)>,
    packed: Vec<Packer>,
    damage: Vec<Splice>,
    size: Option<Size>,
    room: Option<u16>,
}

#[derive(Arbitrary, Debug)]
enum Content {
    Raw(Vec<Part>),
    Qcow2(Shape, Vec<Edit>),
}

#[derive(Arbitrary, Debug)]
enum Part {
    Data(Vec<u8>),
    Zeros(u16),
    Filled(u8, u16),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Packer {
    Gzip,
    Zstd,
    Xz,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Size {
    /// As many bytes less, or more, than the disk has.
    Less(u8),
    More(u16),
    Bytes(u32),
}

fn raw(parts: &[Part]) -> Vec<u8> {
    let mut disk = Vec::new();
    for part in parts.iter().take(8) {
        match part {
            Part::Data(data) => disk.extend(data),
            Part::Zeros(length) => disk.resize(disk.len() + 8 * usize::from(*length), 0),
            Part::Filled(fill, length) => disk.resize(disk.len() + 4 * usize::from(*length), *fill),
        }
    }
    disk
}

fn pack(packer: Packer, bytes: &[u8]) -> Vec<u8> {
    match packer {
        Packer::Gzip => gzip(bytes),
        Packer::Zstd => zstd(bytes),
        Packer::Xz => {
            let mut writer =
                XzWriter::new(Vec::new(), XzOptions::with_preset(0)).expect("the options are valid");
            writer.write_all(bytes).expect("compressed");
            writer.finish().expect("compressed")
        }
    }
}

/// Converts, and checks what is true for every image.
fn converted(image: &[u8], limits: Limits) -> (Result<Converted, ConvertError>, File) {
    let disk = memfd();
    let last = Cell::new(0);
    let progress = |done, size| {
        assert!(
            last.get() <= done && done <= size,
            "{done} of {size} after {}",
            last.get()
        );
        last.set(done);
    };
    let result = convert(file(image), &disk, limits, &progress);
    let stored = disk.metadata().expect("a memfd");
    assert!(stored.blocks() * 512 <= limits.room, "{} blocks", stored.blocks());
    match &result {
        Ok(Converted::Disk { size }) => {
            assert_eq!(stored.len(), *size);
            assert!(*size > 0 && limits.size.map_or(size % MIB == 0, |wanted| wanted == *size));
        }
        Ok(Converted::Unpacked) => {
            let mut magic = [0; 4];
            let read = disk.read_exact_at(&mut magic, 0);
            assert!(read.is_ok() && magic == *b"QFI\xfb");
        }
        Err(
            ConvertError::Format { reason }
            | ConvertError::Unreadable { reason }
            | ConvertError::Failed { reason },
        ) => assert!(!reason.is_empty()),
        Err(ConvertError::TooLarge { needed }) => {
            assert!(needed.is_none_or(|needed| limits.size.is_some_and(|size| needed > size)));
        }
        Err(ConvertError::Full) => {}
    }
    (result, disk)
}

fn has(disk: &File, size: u64, content: &[u8]) -> bool {
    let mut bytes = vec![0; size as usize];
    disk.read_exact_at(&mut bytes, 0).is_ok()
        && bytes.starts_with(content)
        && bytes[content.len()..].iter().all(|byte| *byte == 0)
}

fuzz_target!(|program: Program| {
    let (mut image, content, mut whole) = match &program.content {
        Content::Raw(parts) => {
            let mut disk = raw(parts);
            if let Some((kind, rest)) = &program.magic {
                disk.splice(..0, [MAGIC[usize::from(*kind) % MAGIC.len()], rest].concat());
            }
            let is_raw = Format::of(&disk[..disk.len().min(HEAD)]) == Format::Raw;
            (disk.clone(), disk, is_raw)
        }
        Content::Qcow2(shape, edits) => {
            let mut image = Image::build(shape);
            edits.iter().take(8).for_each(|edit| image.edit(edit));
            (image.bytes, image.content, edits.is_empty())
        }
    };
    let packed = &program.packed[..program.packed.len().min(2)];
    for packer in packed {
        image = pack(*packer, &image);
    }
    whole &= program.damage.is_empty() && packed.len() < 2;
    splice(&mut image, &program.damage);

    let length = content.len() as u64;
    let size = program.size.map(|size| match size {
        Size::Less(bytes) => length.saturating_sub(bytes.into()),
        Size::More(bytes) => length + u64::from(bytes),
        Size::Bytes(bytes) => u64::from(bytes) % (8 * MIB),
    });
    let room = program.room.map_or(64 * MIB, |kib| u64::from(kib) << 10);
    let limits = Limits { size, room };
    let (mut result, mut disk) = converted(&image, limits);
    if matches!(result, Ok(Converted::Unpacked)) {
        let mut unpacked = Vec::new();
        let read = disk.rewind().and_then(|()| disk.read_to_end(&mut unpacked));
        read.expect("a memfd");
        (result, disk) = converted(&unpacked, limits);
        assert!(
            !matches!(result, Ok(Converted::Unpacked)),
            "it was compressed twice"
        );
    }
    if !whole || length == 0 {
        return;
    }
    match result {
        Ok(Converted::Disk { size }) => assert!(has(&disk, size, &content), "another disk"),
        Err(ConvertError::TooLarge { .. }) => assert!(size.is_some_and(|size| size < length)),
        Err(ConvertError::Full) => assert!(room < 64 * MIB),
        other => panic!("{other:?}"),
    }
});
