//! Feeds FAT12, FAT16 and FAT32 filesystems with changed sectors to the search for a kernel. Asserts that what is found
//! can be read whole or fails.

#![no_main]

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use husk_fuzz::images::{Patch, Patched, Seed, fat, read, search};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    seed: u8,
    patches: Vec<Patch>,
    cut: Option<u16>,
}

const KERNEL: [u8; 3000] = [7; 3000];

const TREE: [(&str, &[u8]); 6] = [
    ("/EFI/debian/grub.cfg", b"configfile /boot/grub/grub.cfg\n"),
    (
        "/boot/grub/grub.cfg",
        b"load_env\nset default=\"$saved_entry\"\nmenuentry a --id b {\nlinux /boot/kernel root=x\ninitrd /boot/initrd\n}\n",
    ),
    ("/boot/grub/grubenv", b"# GRUB Environment Block\nsaved_entry=b\n"),
    ("/boot/kernel", &KERNEL),
    ("/boot/initrd", &[8; 700]),
    (
        "/loader/entries/a name that is longer than short ones.conf",
        b"title t\nlinux /boot/kernel\ninitrd /boot/initrd\noptions a\n",
    ),
];

static SEEDS: LazyLock<[Seed; 3]> =
    LazyLock::new(|| [256, 4 << 10, 36 << 10].map(|kib| Seed::new(fat(kib, &TREE))));

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
        assert_eq!(read(entry.kernel()).as_deref(), Some(&KERNEL[..]));
    }
});
