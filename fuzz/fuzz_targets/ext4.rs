//! Feeds ext2 and ext4 filesystems with changed sectors to the search for a kernel: superblock, descriptors, inodes,
//! directories, extents and a journal that has to be replayed, also in formats that the seeds lack. Asserts that what
//! is found can be read whole or fails, and that a sound journal has its effect.

#![no_main]

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use husk_fuzz::images::{Patch, Patched, Seed, read, search};
use husk_fuzz::journal::Log;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    seed: u8,
    patches: Vec<Patch>,
    cut: Option<u16>,
    /// The journal of the first seed.
    log: Option<Log>,
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
    let seed = match input.log {
        Some(_) => &SEEDS[0],
        None => &SEEDS[usize::from(input.seed) % SEEDS.len()],
    };
    let patches = &input.patches[..input.patches.len().min(12)];
    let mut disk = Patched::new(seed, patches);
    // The kernel's content as far as it is known; `None` if there need be no kernel.
    let expected = match &input.log {
        Some(log) => log.write(seed, &mut disk).map(Some),
        None => Some(None),
    };
    if let Some(sectors) = input.cut {
        disk.truncate(usize::from(sectors) * 512);
    }
    let found = search(disk);
    if patches.is_empty()
        && input.cut.is_none()
        && let Some(content) = expected
    {
        let entry = found.expect("a kernel");
        assert!(entry.notes.is_empty(), "{:?}", entry.notes);
        if let Some(content) = content {
            let kernel = read(entry.kernel()).expect("the kernel's content");
            assert!(kernel == content[..kernel.len()], "the journal's last state");
        }
    }
});
