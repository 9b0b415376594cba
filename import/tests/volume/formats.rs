//! What is sent: formats, sizes, and damage.

use std::io::Write;
use std::os::unix::fs::MetadataExt;

use flate2::Compression;
use flate2::write::GzEncoder;
use husk_images::VolumeSource;
use lzma_rust2::{XzOptions, XzWriter};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use crate::server::serve_file;
use crate::{MIB, content, failed, filled, http, qcow2};

pub fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut writer = XzWriter::new(Vec::new(), XzOptions::with_preset(1)).unwrap();
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap()
}

fn zst(bytes: &[u8]) -> Vec<u8> {
    compress_to_vec(bytes, CompressionLevel::Fastest)
}

/// Data, a hole, and data at the end.
fn disk() -> Vec<u8> {
    let mut disk = content(200_000);
    disk.resize(3 << 20, 0);
    disk.extend(content(MIB / 2));
    disk
}

fn import(file: Vec<u8>, size: Option<u64>) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let disk = filled(directory.path(), source(file), size);
    let stored = directory.path().join("disk.img").metadata().unwrap();
    assert!(stored.blocks() * 512 <= MIB, "{} blocks", stored.blocks());
    disk
}

/// The reason, after which nothing is left: what was fetched is of no use.
fn refusal(file: Vec<u8>, size: Option<u64>) -> String {
    let directory = tempfile::tempdir().unwrap();
    let reason = failed(directory.path(), source(file), size);
    assert_eq!(crate::entries(directory.path()), [""; 0], "{reason}");
    reason
}

fn source(file: Vec<u8>) -> VolumeSource {
    VolumeSource::Http(http(&serve_file(file)))
}

#[test]
fn every_format_gives_the_same_disk() {
    let disk = disk();
    let image = qcow2::image(&disk);
    let mut rounded = disk.clone();
    rounded.resize(4 << 20, 0);
    let mut larger = disk.clone();
    larger.resize(5 << 20, 0);
    for (name, file) in [
        ("raw", disk.clone()),
        ("gz", gz(&disk)),
        ("xz", xz(&disk)),
        ("zst", zst(&disk)),
        ("qcow2", image.clone()),
        ("qcow2.gz", gz(&image)),
        ("qcow2.xz", xz(&image)),
        ("qcow2.zst", zst(&image)),
    ] {
        assert!(import(file.clone(), None) == rounded, "{name}");
        assert!(import(file, Some(5 << 20)) == larger, "{name}");
    }
    // Whose last part is shorter, and of several members.
    let two = [gz(&disk), gz(b"end")].concat();
    let found = import(two, Some(4 << 20));
    assert_eq!(&found[disk.len()..disk.len() + 4], b"end\0");
}

#[test]
fn disks_that_are_larger_than_the_claim_are_refused_and_kept() {
    let disk = disk();
    let (needed, size) = (disk.len(), 3 << 20);
    let both = format!(
        "the disk has {needed} bytes, more than the {size} of the claim: request at least {needed} bytes"
    );
    let one = format!("the disk has more than the {size} bytes of the claim: request more");
    for (file, text) in [
        (disk.clone(), &both),
        (qcow2::image(&disk), &both),
        (gz(&qcow2::image(&disk)), &both),
        (gz(&disk), &one),
        (xz(&disk), &one),
        (zst(&disk), &one),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let source = source(file);
        assert_eq!(failed(directory.path(), source.clone(), Some(size)), *text);
        // The next one has a larger claim.
        assert_eq!(crate::entries(directory.path()), ["download", "download.json"]);
        assert!(filled(directory.path(), source, Some(4 << 20))[..needed] == disk);
    }
}

#[test]
fn bombs_end_at_the_size_of_the_claim() {
    let layer = gz(&vec![0; 64 << 20]);
    let bomb: Vec<u8> = (0..64).flat_map(|_| layer.clone()).collect();
    let directory = tempfile::tempdir().unwrap();
    let reason = failed(directory.path(), source(bomb), Some(MIB));
    assert!(reason.ends_with("request more"), "{reason}");
}

#[test]
fn damaged_images_are_refused() {
    let (disk, image) = (disk(), qcow2::image(&disk()));
    for (file, text) in [
        (Vec::new(), "it is empty"),
        (gz(b""), "it is empty"),
        (cut(gz(&disk)), ""),
        (cut(xz(&disk)), ""),
        (cut(zst(&disk)), ""),
        (cut(image.clone()), "cut off"),
        (cut(gz(&image)), ""),
        (flipped(gz(&disk)), ""),
        (flipped(xz(&disk)), ""),
        (flipped(zst(&disk)), ""),
        (ending(zst(&disk)), "a zstd frame does not match its checksum"),
        (b"\x1f\x8b".repeat(1000), ""),
        (b"\xfd7zXZ\0".repeat(1000), ""),
        (b"\x28\xb5\x2f\xfd".repeat(1000), ""),
        (
            b"QFI\xfb".repeat(1000),
            "qcow2: version 1363560955 is not supported",
        ),
    ] {
        let reason = refusal(file, Some(8 << 20));
        let begin = "the image could not be read: ";
        assert!(reason.starts_with(begin) && reason.contains(text), "{reason}");
    }
}

#[test]
fn hostile_qcow2_images_are_refused() {
    let image = qcow2::image(&disk());
    let mut data_file = [0; 24];
    data_file[..4].copy_from_slice(b"DATA");
    data_file[7] = 5;
    data_file[8..13].copy_from_slice(b"other");
    let backing = [&[0; 6][..], &[1, 0xf4], &[0, 0, 0, 5]].concat();
    for (at, bytes, text) in [
        (8, &backing[..], "it names a backing file"),
        (104, &data_file[..], "it names a data file"),
        (72, &4_u64.to_be_bytes()[..], "its data is in another file"),
        (72, &2_u64.to_be_bytes()[..], "corrupt"),
        (32, &2_u32.to_be_bytes()[..], "encrypted"),
        (20, &u32::MAX.to_be_bytes()[..], "cluster size"),
        (24, &(u64::MAX - 511).to_be_bytes()[..], "too large"),
        (36, &u32::MAX.to_be_bytes()[..], "not in the file"),
        (4 * 65536, &(1_u64 << 55).to_be_bytes()[..], "cut off"),
    ] {
        let mut image = image.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        for file in [gz(&image), image] {
            let reason = refusal(file, None);
            assert!(
                reason.starts_with("the image could not be read: qcow2: "),
                "{reason}"
            );
            assert!(reason.contains(text), "{reason}");
        }
    }
}

#[test]
fn other_formats_are_refused_by_name() {
    let of = |head: &[u8]| [head, &[1; 1000]].concat();
    let vmdk = "the image is in the format vmdk, which is not supported: convert it with `qemu-img convert -O qcow2`";
    for (file, text) in [
        (of(b"KDMV"), vmdk),
        (gz(&of(b"# Disk DescriptorFile\n")), vmdk),
        (of(b"vhdxfile"), "format vhdx"),
        (xz(&of(b"conectix")), "format vpc"),
        (of(b"BZh9"), "format bzip2"),
        (
            gz(&gz(&disk())),
            "the image is compressed twice: compress it once",
        ),
    ] {
        let reason = refusal(file, None);
        assert!(reason.contains(text), "{reason}");
    }
}

fn cut(mut file: Vec<u8>) -> Vec<u8> {
    file.truncate(file.len() - file.len() / 4);
    file
}

/// With another last byte, which is of a checksum.
fn ending(mut file: Vec<u8>) -> Vec<u8> {
    if let Some(last) = file.last_mut() {
        *last ^= 1;
    }
    file
}

fn flipped(mut file: Vec<u8>) -> Vec<u8> {
    let middle = file.len() / 2;
    file[middle] ^= 0x10;
    file
}
