//! Files with blocks that were preallocated and never written (`fallocate -l`), which read as zeros.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::*;

/// The byte that fills the disk before mke2fs. Blocks that are never written keep it.
const STALE: u8 = 0xaa;

/// A file of `len` bytes whose pieces of `piece` bytes are by turns data and nothing.
fn file(path: &Path, len: usize, piece: usize) -> Vec<u8> {
    let mut content = pattern(7, len);
    let file = File::create(path).unwrap();
    file.set_len(len as u64).unwrap();
    for (number, bytes) in content.chunks_mut(piece).enumerate() {
        match number % 2 {
            0 => file.write_all_at(bytes, (number * piece) as u64).unwrap(),
            _ => bytes.fill(0),
        }
    }
    content
}

/// Boots from a file whose holes were preallocated; `pieces` of `blocks` blocks.
fn check(options: &[&str], block_size: usize, pieces: usize, blocks: usize) {
    let dir = tempfile::tempdir().unwrap();
    let (root, image) = (dir.path().join("root"), dir.path().join("image"));
    fs::create_dir_all(root.join("boot/grub")).unwrap();
    for number in 0..300 {
        fs::write(root.join(format!("boot/a-file-with-a-long-name-{number}")), "").unwrap();
    }
    let piece = blocks * block_size;
    let content = file(&root.join("boot/k"), pieces * piece - 100, piece);
    fs::write(root.join("boot/grub/grub.cfg"), "linux /boot/k").unwrap();
    fs::write(&image, vec![STALE; 32 << 20]).unwrap();
    let (block_size, path) = (block_size.to_string(), image.to_str().unwrap());
    let fixed = ["-q", "-F", "-E", "nodiscard", "-b", &block_size, "-d"];
    let root = root.to_str().unwrap();
    run("/sbin/mke2fs", &[&fixed, &[root][..], options, &[path]].concat());
    for number in (1..pieces).step_by(2) {
        let (first, last) = (number * blocks, (number + 1) * blocks - 1);
        let command = format!("fallocate /boot/k {first} {last}");
        run("/sbin/debugfs", &["-w", "-R", &command, path]);
    }
    let extents = std::process::Command::new("/sbin/debugfs")
        .args(["-R", "ex /boot/k", path])
        .output();
    let extents = String::from_utf8(extents.unwrap().stdout).unwrap();
    assert_eq!(extents.matches("Uninit").count(), pieces / 2, "{extents}");
    let entry = find(fs::read(&image).unwrap()).unwrap();
    assert!(
        read(entry.kernel()) == content,
        "{options:?} {block_size} {pieces}"
    );
}

#[test]
fn preallocated_blocks_read_as_zeros() {
    check(&["-t", "ext4"], 4096, 3, 2);
    check(&["-t", "ext4"], 1024, 3, 5);
    check(&["-t", "ext4", "-O", "^64bit,^metadata_csum"], 1024, 4, 1);
    // Trees with children, and a file behind the first group.
    check(&["-t", "ext4"], 1024, 201, 3);
    check(&["-t", "ext4", "-O", "bigalloc"], 1024, 3, 32);
    check(&["-t", "ext4", "-g", "1024", "-N", "1024"], 1024, 40, 40);
}
