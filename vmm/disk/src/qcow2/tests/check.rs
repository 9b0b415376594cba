//! Checks the reference counts of an image: 1 for every cluster in use, 0 for all others.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

fn word(file: &File, at: u64, len: usize) -> u64 {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

fn table(file: &File, at: u64, entries: u64) -> Vec<u64> {
    let mut bytes = vec![0; entries as usize * 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
        .chunks(8)
        .map(|c| u64::from_be_bytes(c.try_into().unwrap()))
        .collect()
}

/// Panics if an image without snapshots and compressed clusters, with counts of 16 bits, is not sound.
pub fn check(file: &File) {
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
    let cluster = 1u64 << word(file, 20, 4);
    let (l1_entries, l1) = (word(file, 36, 4), word(file, 40, 8));
    let (counts, count_clusters) = (word(file, 48, 8), word(file, 56, 4));
    let mut used = BTreeMap::from([(0, "header")]);
    let mut take = |at: u64, len: u64, what| {
        for at in (at..at + len).step_by(cluster as usize) {
            let before = used.insert(at, what);
            assert_eq!(before, None, "{at:#x} is taken, now as {what}");
        }
    };
    take(l1, l1_entries * 8, "L1");
    take(counts, count_clusters * cluster, "refcount table");
    for entry in table(file, l1, l1_entries) {
        if entry & OFFSET == 0 {
            continue;
        }
        take(entry & OFFSET, cluster, "L2");
        for entry in table(file, entry & OFFSET, cluster / 8) {
            if entry & OFFSET != 0 {
                assert!(entry >> 63 == 1, "{entry:#x} is not copied");
                take(entry & OFFSET, cluster, "data");
            }
        }
    }
    let blocks = table(file, counts, count_clusters * cluster / 8);
    for entry in blocks.iter().filter(|entry| **entry != 0) {
        take(*entry, cluster, "refcount block");
    }
    for (i, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
        let mut bytes = vec![0; cluster as usize];
        file.read_exact_at(&mut bytes, *block).unwrap();
        for (j, count) in bytes.chunks(2).enumerate() {
            let at = (i as u64 * (cluster / 2) + j as u64) * cluster;
            let count = u16::from_be_bytes(count.try_into().unwrap());
            let what = used.remove(&at);
            assert_eq!(count, u16::from(what.is_some()), "{at:#x} is {what:?}");
        }
    }
    assert!(used.is_empty(), "not counted: {used:?}");
}
