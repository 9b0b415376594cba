//! Feeds headers of qcow2 images, their extensions and any bytes behind them to the reader that starts no threads.
//! Asserts that an image which names another file or uses an unknown feature is refused, and that extents cover the disk.

#![no_main]

use std::fs::File;

use arbitrary::Arbitrary;
use husk_disk::Qcow2Reader;
use husk_disk::testing::InlineImage;
use husk_fuzz::images::file;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    header: Header,
    extensions: Vec<Extension<'a>>,
    /// Entries of the first tables.
    entries: Vec<(u8, Entry)>,
    rest: &'a [u8],
    clusters: u8,
    /// The file is these bytes instead, after the magic number.
    raw: Option<&'a [u8]>,
}

/// The fields of a header; `None` is what most images have.
#[derive(Arbitrary, Debug)]
struct Header {
    version: Option<u32>,
    backing_offset: Option<u64>,
    backing_size: u32,
    cluster_bits: u8,
    size: Size,
    encryption: Option<u32>,
    l1_entries: Option<u32>,
    l1: Option<Offset>,
    counts: Option<Offset>,
    count_clusters: Option<u32>,
    snapshots: Option<u32>,
    features: [Option<u64>; 3],
    count_order: Option<u8>,
    length: Option<u32>,
}

#[derive(Arbitrary, Debug)]
enum Size {
    Sectors(u16),
    Bytes(u64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Offset {
    Cluster(u8),
    Byte(u64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Entry {
    Cluster(u8),
    Copied(u8),
    Packed(u8, u16),
    Word(u64),
}

#[derive(Arbitrary, Debug)]
struct Extension<'a> {
    kind: Kind,
    /// Instead of the length of the content.
    len: Option<u32>,
    content: &'a [u8],
}

#[derive(Arbitrary, Debug)]
enum Kind {
    End,
    BackingFormat,
    DataFile,
    Encryption,
    Features,
    Other(u32),
}

impl Kind {
    fn number(&self) -> u32 {
        match *self {
            Self::End => 0,
            Self::BackingFormat => 0xe279_2aca,
            Self::DataFile => 0x4441_5441,
            Self::Encryption => 0x0537_be77,
            Self::Features => 0x6803_f857,
            Self::Other(kind) => kind,
        }
    }
}

fn image(input: &Input<'_>) -> Vec<u8> {
    let header = &input.header;
    let bits = 9 + u32::from(header.cluster_bits % 8);
    let cluster = 1_usize << bits;
    let offset = |place: Offset| match place {
        Offset::Cluster(number) => u64::from(number) << bits,
        Offset::Byte(byte) => byte,
    };
    let size = match header.size {
        Size::Sectors(sectors) => u64::from(sectors) * 512,
        Size::Bytes(bytes) => bytes,
    };
    let tables = size.div_ceil(cluster as u64 * (cluster as u64 / 8));
    let mut head = Vec::new();
    let mut put = |value: u64, len: usize| head.extend_from_slice(&value.to_be_bytes()[8 - len..]);
    put(0x5146_49fb, 4);
    put(header.version.unwrap_or(3).into(), 4);
    put(header.backing_offset.unwrap_or(0), 8);
    put(header.backing_size.into(), 4);
    put(bits.into(), 4);
    put(size, 8);
    put(header.encryption.unwrap_or(0).into(), 4);
    put(header.l1_entries.map_or(tables, u64::from), 4);
    put(header.l1.map_or(cluster as u64, offset), 8);
    put(header.counts.map_or(2 * cluster as u64, offset), 8);
    put(header.count_clusters.unwrap_or(1).into(), 4);
    put(header.snapshots.unwrap_or(0).into(), 4);
    put(0, 8);
    header
        .features
        .iter()
        .for_each(|feature| put(feature.unwrap_or(0), 8));
    put(header.count_order.unwrap_or(4).into(), 4);
    put(header.length.unwrap_or(104).into(), 4);
    for extension in input.extensions.iter().take(8) {
        let len = extension.len.unwrap_or(extension.content.len() as u32);
        put(extension.kind.number().into(), 4);
        put(len.into(), 4);
        extension.content.iter().for_each(|byte| put((*byte).into(), 1));
        (extension.content.len()..extension.content.len().next_multiple_of(8)).for_each(|_| put(0, 1));
    }
    head.resize(head.len().max(3 * cluster), 0);
    for (place, entry) in input.entries.iter().take(16) {
        let at = cluster * (1 + usize::from(place & 1)) + usize::from(place >> 1) * 8;
        let entry = match *entry {
            Entry::Cluster(number) => u64::from(number) << bits,
            Entry::Copied(number) => 1 << 63 | u64::from(number) << bits,
            Entry::Packed(sectors, at) => 1 << 62 | u64::from(sectors) << (62 - (bits - 8)) | u64::from(at),
            Entry::Word(word) => word,
        };
        if let Some(bytes) = head.get_mut(at..at + 8) {
            bytes.copy_from_slice(&entry.to_be_bytes());
        }
    }
    head.extend_from_slice(input.rest);
    head
}

fn extents(size: u64, extent: impl Fn(u64) -> std::io::Result<husk_disk::Extent>) {
    let mut at = 0;
    for _ in 0..64 {
        if at >= size {
            return assert_eq!(at, size, "an extent leaves the disk");
        }
        let Ok(extent) = extent(at) else { return };
        assert!(extent.offset == at && extent.len > 0);
        at = at.checked_add(extent.len).expect("an extent is on the disk");
    }
}

fuzz_target!(|input: Input<'_>| {
    let bytes = match input.raw {
        Some(raw) => [b"QFI\xfb\0\0\0", raw].concat(),
        None => image(&input),
    };
    let stored = file(&bytes);
    if input.raw.is_none() {
        let clusters = bytes.len().next_multiple_of(512) as u64 + u64::from(input.clusters) * 512;
        stored.set_len(clusters).expect("a longer file");
    }
    let fd = |file: &File| file.try_clone().expect("a descriptor").into();
    let mut memory = [0; 4096];
    if let Ok(reader) = Qcow2Reader::open(fd(&stored)) {
        let size = reader.size();
        assert!(size > 0 && size.is_multiple_of(512));
        assert_eq!(bytes[8..16], [0; 8], "a backing file");
        if bytes[7] == 3 {
            assert_eq!(bytes[72..80], [0; 8], "a feature");
        }
        extents(size, |at| reader.extent(at));
        let len = memory.len().min(size as usize);
        let _ = reader.read_at(0, &mut memory[..len]);
        let _ = reader.read_at(size - len as u64, &mut memory[..len]);
        assert!(reader.read_at(size - len as u64 + 1, &mut memory[..len]).is_err());
        assert!(reader.read_at(u64::MAX, &mut memory).is_err());
    }
    if let Ok(image) = InlineImage::open(fd(&stored), None, husk_disk::DiskOptions::default()) {
        assert_eq!(bytes[8..16], [0; 8], "a backing file");
        assert_eq!(bytes[60..64], [0; 4], "snapshots");
        extents(image.size(), |at| image.extent(at));
    }
});
