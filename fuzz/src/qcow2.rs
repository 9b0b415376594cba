//! qcow2 images (docs/interop/qcow2.txt of QEMU) with their content.

use arbitrary::Arbitrary;

use crate::images::Value;

/// Sectors of the largest disk.
const MAX_SECTORS: u64 = 512;
/// Clusters that hold something at first.
const MAX_CLUSTERS: usize = 24;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// The parameters of an image.
#[derive(Arbitrary, Clone, Debug)]
pub struct Shape {
    version_2: bool,
    cluster_bits: u8,
    sectors: u16,
    count_order: u8,
    clusters: Vec<(u16, Content)>,
}

/// The content of a cluster.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Content {
    Data(u8),
    Packed(u8),
    Zero,
    /// Reads as zeroes, with storage.
    AllocatedZero,
}

/// The place of a change in an image.
#[derive(Arbitrary, Clone, Debug)]
pub struct Edit {
    table: Table,
    entry: u16,
    value: Entry,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Table {
    Header,
    L1,
    L2,
    Counts,
    Count,
    Anywhere,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Entry {
    Value(Value),
    /// The offset of a cluster of the file, with flags.
    Cluster {
        flags: u8,
        number: u8,
    },
    /// A compressed cluster.
    Packed {
        sectors: u8,
        at: u16,
    },
}

/// An image.
#[derive(Debug)]
pub struct Image {
    /// The file.
    pub bytes: Vec<u8>,
    /// Content of the disk.
    pub content: Vec<u8>,
    /// For each sector, true if it comes from the base image.
    pub from_base: Vec<bool>,
    /// Bytes of a cluster.
    pub cluster: usize,
    /// Version 2 has no way to say that a cluster is discarded.
    pub version_2: bool,
    cluster_bits: u32,
    tables: [usize; 5],
}

fn put(bytes: &mut [u8], at: usize, value: u64, len: usize) {
    bytes[at..at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
}

/// Sets a reference count of `1 << order` bits to 1.
fn count_one(counts: &mut [u8], index: usize, order: u32) {
    let bits = 1_usize << order;
    if bits < 8 {
        let at = index * bits;
        counts[at / 8] |= 1 << (at % 8);
    } else {
        let bytes = bits / 8;
        put(counts, index * bytes, 1, bytes);
    }
}

/// The content of a cluster that is compressed: deflate's way to store bytes as they are.
fn stored(fill: u8, cluster: usize) -> Vec<u8> {
    let len = (cluster as u16).to_le_bytes();
    let mut packed = vec![1, len[0], len[1], !len[0], !len[1]];
    packed.extend((0..cluster).map(|i| fill ^ i as u8));
    packed
}

impl Image {
    /// Builds the image of a shape.
    #[must_use]
    pub fn build(shape: &Shape) -> Self {
        let cluster_bits = 9 + u32::from(shape.cluster_bits % 6);
        let order = if shape.version_2 {
            4
        } else {
            u32::from(shape.count_order % 7)
        };
        let cluster = 1_usize << cluster_bits;
        let size = (1 + u64::from(shape.sectors) % MAX_SECTORS) as usize * 512;
        let guest_clusters = size.div_ceil(cluster);
        let per_table = cluster / 8;
        let l1_entries = guest_clusters.div_ceil(per_table);

        let mut content = vec![0; size.next_multiple_of(cluster)];
        let mut from_base = vec![true; size / 512];
        let mut file = vec![0_u8; cluster];
        let allocate = |file: &mut Vec<u8>, len: usize| {
            let at = file.len();
            file.resize(at + len.next_multiple_of(cluster), 0);
            at
        };
        let l1 = allocate(&mut file, l1_entries * 8);
        let mut first_l2 = l1;
        for (number, kind) in shape.clusters.iter().take(MAX_CLUSTERS) {
            let number = usize::from(*number) % guest_clusters;
            let l1_entry = l1 + number / per_table * 8;
            let mut l2 = u64::from_be_bytes(file[l1_entry..l1_entry + 8].try_into().unwrap_or_default());
            if l2 == 0 {
                first_l2 = allocate(&mut file, cluster);
                l2 = first_l2 as u64 | COPIED;
                put(&mut file, l1_entry, l2, 8);
            }
            let l2_entry = (l2 & !COPIED) as usize + number % per_table * 8;
            if file[l2_entry..l2_entry + 8] != [0; 8] {
                continue;
            }
            let range = number * cluster..(number + 1) * cluster;
            let entry = match *kind {
                Content::Zero | Content::AllocatedZero if shape.version_2 => continue,
                Content::Zero => 1,
                Content::AllocatedZero => {
                    let at = allocate(&mut file, cluster);
                    file[at..at + cluster].fill(0xee);
                    at as u64 | COPIED | 1
                }
                Content::Data(fill) => {
                    let at = allocate(&mut file, cluster);
                    file[at..at + cluster].fill(fill);
                    content[range].fill(fill);
                    at as u64 | COPIED
                }
                Content::Packed(fill) => {
                    let packed = stored(fill, cluster);
                    let at = allocate(&mut file, packed.len());
                    file[at..at + packed.len()].copy_from_slice(&packed);
                    content[range].copy_from_slice(&packed[5..]);
                    COMPRESSED | (cluster as u64 / 512) << (62 - (cluster_bits - 8)) | at as u64
                }
            };
            put(&mut file, l2_entry, entry, 8);
            let sectors = number * cluster / 512..((number + 1) * cluster / 512).min(size / 512);
            from_base[sectors].fill(false);
        }
        content.truncate(size);

        let per_block = (cluster * 8) >> order;
        let used = file.len() / cluster + 1;
        let mut blocks = 1;
        while blocks * per_block < used + blocks {
            blocks += 1;
        }
        let counts = allocate(&mut file, blocks * 8);
        let first_block = allocate(&mut file, blocks * cluster);
        for block in 0..blocks {
            put(
                &mut file,
                counts + block * 8,
                (first_block + block * cluster) as u64,
                8,
            );
        }
        for index in 0..file.len() / cluster {
            let block = first_block + index / per_block * cluster;
            count_one(&mut file[block..block + cluster], index % per_block, order);
        }

        let version = if shape.version_2 { 2 } else { 3 };
        let count_clusters = (blocks * 8).div_ceil(cluster);
        for (at, value, len) in [
            (0, 0x5146_49fb, 4),
            (4, version, 4),
            (20, u64::from(cluster_bits), 4),
            (24, size as u64, 8),
            (36, l1_entries as u64, 4),
            (40, l1 as u64, 8),
            (48, counts as u64, 8),
            (56, count_clusters as u64, 4),
        ] {
            put(&mut file, at, value, len);
        }
        if !shape.version_2 {
            put(&mut file, 96, u64::from(order), 4);
            put(&mut file, 100, 104, 4);
        }
        Self {
            bytes: file,
            content,
            from_base,
            cluster,
            version_2: shape.version_2,
            cluster_bits,
            tables: [0, l1, first_l2, counts, first_block],
        }
    }

    /// Applies a change.
    pub fn edit(&mut self, edit: &Edit) {
        let entry = usize::from(edit.entry);
        let at = match edit.table {
            Table::Header => entry % 120,
            Table::L1 => self.tables[1] + entry % 8 * 8,
            Table::L2 => self.tables[2] + entry % (self.cluster / 8) * 8,
            Table::Counts => self.tables[3] + entry % 8 * 8,
            Table::Count => self.tables[4] + entry % self.cluster,
            Table::Anywhere => entry,
        };
        let value = match edit.value {
            Entry::Value(value) => {
                if let Some(rest) = self.bytes.get_mut(at..) {
                    value.put(rest, true);
                }
                return;
            }
            Entry::Cluster { flags, number } => {
                u64::from(flags & 3) << 62
                    | u64::from(number) << self.cluster_bits
                    | u64::from(flags >> 2 & 1)
            }
            Entry::Packed { sectors, at } => {
                COMPRESSED | u64::from(sectors) << (62 - (self.cluster_bits - 8)) | u64::from(at)
            }
        };
        if self.bytes.len() >= at + 8 {
            put(&mut self.bytes, at, value, 8);
        }
    }
}
