//! Feeds ext2 and ext4 filesystems with changed sectors to the search for a kernel: superblock, descriptors, inodes,
//! directories, extents and a journal that has to be replayed. Asserts that what is found can be read whole or fails.

#![no_main]

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use husk_fuzz::images::{Patch, Patched, Seed, search};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    seed: u8,
    patches: Vec<Patch>,
    cut: Option<u16>,
}

static SEEDS: LazyLock<[Seed; 3]> = LazyLock::new(|| {
    let seeds: [&[u8]; 3] = [
        include_bytes!("../seeds/ext4.sparse"),
        include_bytes!("../seeds/wide.sparse"),
        include_bytes!("../seeds/ext2.sparse"),
    ];
    seeds.map(Seed::unpack)
});

fuzz_target!(|input: Input| {
    let seed = &SEEDS[usize::from(input.seed) % SEEDS.len()];
    let patches = &input.patches[..input.patches.len().min(12)];
    let mut disk = Patched::new(seed, patches);
    if let Some(sectors) = input.cut {
        disk.truncate(usize::from(sectors) * 512);
    }
    let found = search(disk);
    if patches.is_empty() && input.cut.is_none() {
        let entry = found.expect("the seed has a kernel");
        assert!(entry.notes.is_empty(), "{:?}", entry.notes);
    }
});
