//! Disk images made of real filesystems: ext by mke2fs (Essential on Debian), FAT by the fatfs crate, GPT by gptman.

#![allow(dead_code)]

use std::fs;
use std::io::{Cursor, Seek, SeekFrom, Write};
use std::process::Command;
use std::sync::Arc;

use husk_image::{BootEntry, BootFiles, FindError};

pub const ESP: [u8; 16] = [
    0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b,
];
pub const LINUX: [u8; 16] = [
    0xaf, 0x3d, 0xc6, 0x0f, 0x83, 0x84, 0x72, 0x47, 0x8e, 0x79, 0x3d, 0x69, 0xd8, 0x47, 0x7d, 0xe4,
];
pub const ROOT_UUID: &str = "11111111-2222-3333-4444-555555555555";
pub const BOOT_UUID: &str = "66666666-7777-8888-9999-aaaaaaaaaaaa";

/// A file or, where the contents start with `->`, a symbolic link.
pub type Tree<'a> = &'a [(&'a str, &'a [u8])];

/// Contents that differ from place to place, so that misplaced blocks show.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i / 251) as u8 ^ (i % 251) as u8 ^ seed)
        .collect()
}

pub fn run(program: &str, args: &[&str]) {
    let output = Command::new(program)
        .args(args)
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(
        output.status.success(),
        "{program} {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// An ext filesystem of `mib` MiB; `options` go to mke2fs.
pub fn ext(mib: u32, uuid: &str, options: &[&str], tree: Tree<'_>) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    for (path, contents) in tree {
        let path = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match contents.strip_prefix(b"->") {
            Some(target) => std::os::unix::fs::symlink(std::str::from_utf8(target).unwrap(), path).unwrap(),
            None => fs::write(path, contents).unwrap(),
        }
    }
    let image = dir.path().join("image");
    let mut args = vec!["-q", "-F", "-U", uuid];
    args.extend(options);
    let size = format!("{mib}M");
    args.extend(["-d", root.to_str().unwrap(), image.to_str().unwrap(), &size]);
    run("/sbin/mke2fs", &args);
    fs::read(image).unwrap()
}

pub fn ext4(tree: Tree<'_>) -> Vec<u8> {
    ext(16, ROOT_UUID, &["-t", "ext4"], tree)
}

/// A FAT filesystem of `mib` MiB: FAT32 from 40 on, below FAT12 or FAT16.
pub fn fat(mib: usize, tree: Tree<'_>) -> Vec<u8> {
    let mut disk = Cursor::new(vec![0; mib << 20]);
    let mut options = fatfs::FormatVolumeOptions::new()
        .volume_id(0xabcd_1234)
        .volume_label(*b"EFI        ");
    if mib >= 40 {
        options = options.fat_type(fatfs::FatType::Fat32).bytes_per_cluster(512);
    }
    fatfs::format_volume(&mut disk, options).unwrap();
    {
        let fs = fatfs::FileSystem::new(&mut disk, fatfs::FsOptions::new()).unwrap();
        for (path, contents) in tree {
            let mut dir = fs.root_dir();
            let mut parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
            let name = parts.pop().unwrap();
            for part in parts {
                dir = dir.create_dir(part).unwrap();
            }
            dir.create_file(name).unwrap().write_all(contents).unwrap();
        }
    }
    disk.into_inner()
}

/// A disk with a GPT and these partitions, each at a multiple of 1 MiB.
pub fn gpt(partitions: &[([u8; 16], Vec<u8>)]) -> Vec<u8> {
    gpt_of_sectors(512, partitions)
}

/// The same, with sectors of `sector` bytes.
pub fn gpt_of_sectors(sector: u64, partitions: &[([u8; 16], Vec<u8>)]) -> Vec<u8> {
    let total: usize = partitions
        .iter()
        .map(|(_, p)| p.len().next_multiple_of(1 << 20))
        .sum();
    let mut disk = Cursor::new(vec![0; total + (3 << 20)]);
    let mut table = gptman::GPT::new_from(&mut disk, sector, [7; 16]).unwrap();
    let mut start = 1 << 20;
    for (number, (kind, bytes)) in (1..).zip(partitions) {
        table[number] = gptman::GPTPartitionEntry {
            partition_type_guid: *kind,
            unique_partition_guid: [number as u8; 16],
            starting_lba: start / sector,
            ending_lba: (start + bytes.len() as u64) / sector - 1,
            attribute_bits: 0,
            partition_name: "".into(),
        };
        disk.seek(SeekFrom::Start(start)).unwrap();
        disk.write_all(bytes).unwrap();
        start += bytes.len().next_multiple_of(1 << 20) as u64;
    }
    table.write_into(&mut disk).unwrap();
    gptman::GPT::write_protective_mbr_into(&mut disk, sector).unwrap();
    disk.into_inner()
}

/// Writes the MBR entry `slot` of the record at `sector`.
pub fn mbr_entry(disk: &mut [u8], sector: usize, slot: usize, kind: u8, first: u32, sectors: u32) {
    let record = &mut disk[sector * 512..][..512];
    record[510..].copy_from_slice(&[0x55, 0xaa]);
    let entry = &mut record[446 + 16 * slot..][..16];
    entry[4] = kind;
    entry[8..12].copy_from_slice(&first.to_le_bytes());
    entry[12..].copy_from_slice(&sectors.to_le_bytes());
}

/// A disk with one primary partition at 1 MiB.
pub fn mbr(partition: &[u8]) -> Vec<u8> {
    let mut disk = vec![0; 1 << 20];
    disk.extend_from_slice(partition);
    mbr_entry(&mut disk, 0, 0, 0x83, 2048, (partition.len() / 512) as u32);
    disk
}

pub fn find(disk: Vec<u8>) -> Result<BootEntry, FindError> {
    husk_image::find(Arc::new(disk))
}

pub fn read(files: &BootFiles) -> Vec<u8> {
    let mut bytes = Vec::new();
    files
        .read_into(&mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })
        .unwrap();
    assert_eq!(bytes.len() as u64, files.size());
    bytes
}
