//! Kernels and disk images that cannot be booted, damaged by accident or on purpose.

use crate::harness::context::{TestContext, expect_contains};
use crate::harness::manifest::Manifest;
use crate::harness::{Case, SMALL, images};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

pub const GARBAGE_KERNEL: Case = Case {
    name: "garbage-kernel",
    about: "a kernel that is none gives status 12 and the reason",
    limit: SMALL,
    run: garbage_kernel,
};

pub const TRUNCATED_IMAGE: Case = Case {
    name: "truncated-image",
    about: "a disk image that was cut off gives status 12 and says what was looked for and found",
    limit: SMALL,
    run: |ctx| truncated_images(ctx, &[("debian-13-cloud", 1), ("debian-13-cloud", 64)]),
};

pub const TRUNCATED_OTHERS: Case = Case {
    name: "truncated-images-full",
    about: "the same for images with an MBR and with an EFI system partition",
    limit: SMALL,
    run: |ctx| truncated_images(ctx, &[("debian-12-cloud", 1), ("debian-13-bls", 20)]),
};

pub const HOSTILE_IMAGES: Case = Case {
    name: "hostile-images",
    about: "partition tables and filesystems made to harm give status 12 quickly, without a panic",
    limit: SMALL,
    run: hostile_images,
};

/// Exit status of `husk run` if no kernel could be loaded.
const BOOT_FAILED: i32 = 12;
/// Time limit for an image to be read or rejected.
const READING: Duration = Duration::from_secs(30);

/// Runs `manifest`, which cannot boot; returns the error output.
fn refused(ctx: &TestContext, manifest: &Manifest) -> Result<String> {
    let started = Instant::now();
    let answer = ctx.run_within(&manifest.run_words(ctx)?, READING * 2)?;
    let text = answer
        .fails(BOOT_FAILED)
        .with_context(|| manifest.name().to_owned())?;
    let took = started.elapsed();
    ensure!(took < READING, "{}: it took {took:?}", manifest.name());
    ensure!(!text.contains("SIG"), "{}: {text}", manifest.name());
    ctx.nothing_left(Duration::from_secs(5))?;
    Ok(text)
}

fn garbage_kernel(ctx: &TestContext) -> Result<()> {
    let good = std::fs::read(images::small("6.12")?.packed().kernel)?;
    let mut liar = good[..4096].to_vec();
    // The maximum of setup sectors, and of everything else, that the header can express.
    liar[0x1f1] = 0xff;
    liar[0x1f4..0x1f8].fill(0xff);
    let noise: Vec<u8> = (0..1_u32 << 20)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(16, 0);
    elf.resize(4096, 0xff);
    let kernels: [(&str, &[u8]); 6] = [
        ("empty", b""),
        ("text", b"#!/bin/sh\necho I am no kernel\n"),
        ("noise", &noise),
        ("cut-off", &good[..1000]),
        ("liar", &liar),
        ("elf", &elf),
    ];
    for (name, bytes) in kernels {
        let path = ctx.path(&format!("kernel-{name}"));
        std::fs::write(&path, bytes)?;
        let manifest = Manifest::new(name).argument("--kernel").argument(&path);
        let text = refused(ctx, &manifest)?;
        expect_contains(&text, &["error"])?;
    }
    Ok(())
}

fn disk(name: &str, path: &Path) -> Manifest {
    Manifest::new(name).container_disk("root", path)
}

fn truncated_images(ctx: &TestContext, images: &[(&str, u64)]) -> Result<()> {
    for (image, mebibytes) in images {
        let path = ctx.path("truncated.img");
        copy_start(&images::disk(image)?, &path, mebibytes << 20)?;
        let text = refused(ctx, &disk(&format!("cut-{image}-{mebibytes}"), &path))?;
        expect_contains(&text, &["no kernel"])?;
    }
    Ok(())
}

fn copy_start(from: &Path, to: &Path, bytes: u64) -> Result<()> {
    let (from, to) = (File::open(from)?, File::create(to)?);
    to.set_len(bytes)?;
    let mut block = vec![0; 1 << 20];
    for at in (0..bytes).step_by(block.len()) {
        from.read_exact_at(&mut block, at)?;
        to.write_all_at(&block, at)?;
    }
    Ok(())
}

/// Bytes and their offset.
type Pieces = Vec<(u64, Vec<u8>)>;

fn hostile_images(ctx: &TestContext) -> Result<()> {
    let path = ctx.path("hostile.img");
    let size: u64 = 64 << 20;
    // Name of each image, and the bytes that differ from zeros.
    let whole = vec![0xff; 4 << 20];
    let images: [(&str, Pieces); 6] = [
        ("zeros", vec![]),
        ("ones", vec![(0, whole)]),
        (
            "mbr-beyond-the-end",
            vec![(446, mbr_entry(0x83, 0xffff_0000, 0xffff))],
        ),
        // An extended partition whose chain of logical partitions contains a loop.
        (
            "mbr-loop",
            vec![
                (446, mbr_entry(0x05, 2048, 4096)),
                (2048 * 512 + 446, mbr_entry(0x05, 0, 4096)),
            ],
        ),
        ("gpt-too-many", gpt()),
        ("ext4-lies", ext4()),
    ];
    for (name, pieces) in images {
        let file = File::create(&path)?;
        file.set_len(size)?;
        for (at, bytes) in pieces {
            file.write_all_at(&bytes, at)?;
        }
        let text = refused(ctx, &disk(name, &path))?;
        expect_contains(&text, &["no kernel"]).with_context(|| name.to_owned())?;
    }
    // The same in a real image: every block of its partition's first part is noise.
    copy_start(&images::disk("debian-13-cloud")?, &path, size)?;
    let file = File::options().write(true).open(&path)?;
    for block in 0..2048u64 {
        let noise: Vec<u8> = (0..4096u64)
            .map(|i| ((i + block).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
            .collect();
        // The superblock's magic number stays.
        if block != 0 {
            file.write_all_at(&noise, (4 << 20) + block * 4096)?;
        }
    }
    expect_contains(&refused(ctx, &disk("noise-in-ext4", &path))?, &["no kernel"])
}

/// An MBR partition table with one entry, and the boot signature.
fn mbr_entry(kind: u8, start: u32, sectors: u32) -> Vec<u8> {
    let mut table = vec![0x80, 0, 2, 0, kind, 0, 0, 0];
    table.extend(start.to_le_bytes());
    table.extend(sectors.to_le_bytes());
    table.resize(64, 0);
    table.extend([0x55, 0xaa]);
    table
}

/// A GPT header with four billion entries of four gigabytes.
fn gpt() -> Pieces {
    let mut header = b"EFI PART\x00\x00\x01\x00".to_vec();
    header.extend(92u32.to_le_bytes());
    header.resize(24, 0);
    header.extend(1u64.to_le_bytes());
    header.extend(u64::MAX.to_le_bytes());
    header.extend(34u64.to_le_bytes());
    header.extend(u64::MAX.to_le_bytes());
    header.resize(72, 0x41);
    header.extend(2u64.to_le_bytes());
    header.extend(u32::MAX.to_le_bytes());
    header.extend(u32::MAX.to_le_bytes());
    header.resize(92, 0);
    let checksum = crc32(&header);
    header[16..20].copy_from_slice(&checksum.to_le_bytes());
    vec![(446, mbr_entry(0xee, 1, u32::MAX)), (512, header)]
}

/// An ext4 superblock with the right magic number, and the largest value in every field that is a count.
fn ext4() -> Pieces {
    let mut superblock = vec![0xff; 1024];
    superblock[24..28].copy_from_slice(&2u32.to_le_bytes());
    superblock[56..58].copy_from_slice(&0xef53u16.to_le_bytes());
    // Incompatible features: file types, extents, 64 bit.
    superblock[96..100].copy_from_slice(&0xc2u32.to_le_bytes());
    vec![(1024, superblock)]
}

/// CRC-32 as GPT uses it (IEEE 802.3).
fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                crc >> 1 ^ 0xedb8_8320
            } else {
                crc >> 1
            };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    #[test]
    fn crc32_is_the_usual_one() {
        assert_eq!(super::crc32(b"123456789"), 0xcbf4_3926);
    }
}
