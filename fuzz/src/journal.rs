//! A jbd2 journal for `seeds/ext4.sparse`, in each format, and what it makes of `/boot/kernel`
//! (kernel documentation, ext4/journal).

use arbitrary::Arbitrary;
use crc::{CRC_32_ISCSI, Crc};

use crate::images::{Patched, Seed, Value};

const BLOCK: usize = 1024;
const MAGIC: u32 = 0xc03b_3998;
const DESCRIPTOR: u32 = 1;
const COMMIT: u32 = 2;
const REVOKE: u32 = 5;

/// Runs of the journal's file: first block in the file, first block on the filesystem.
const EXTENTS: [(usize, usize); 3] = [(17, 51), (2, 20), (0, 17)];
/// Blocks of `/boot/kernel`, which are adjacent.
const KERNEL: [u32; 5] = [1065, 1066, 1067, 1068, 1069];
/// Blocks of the journal, and those of them for fast commits.
const BLOCKS: usize = 1024;
const FAST: usize = 256;

const MAX_RECORDS: usize = 24;
const MAX_TAGS: usize = 20;

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
enum Checksums {
    None,
    V2,
    V3,
}

/// A journal that has to be replayed.
#[derive(Arbitrary, Debug)]
pub struct Log {
    checksums: Checksums,
    /// Block numbers have 64 bits.
    wide: bool,
    fast_commits: bool,
    start: u16,
    sequence: u32,
    records: Vec<Record>,
}

#[derive(Arbitrary, Debug)]
enum Record {
    /// A descriptor block, and the blocks that it announces.
    Descriptor(Vec<Tag>),
    Revoke(Vec<Target>),
    Commit,
    /// Changes the last descriptor, revocation or commit, and keeps its checksum right.
    Patch(u16, Value),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Target {
    Kernel(u8),
    Block(u16),
    Any(u64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Tag {
    target: Target,
    escaped: bool,
    /// No UUID follows the tag.
    same_uuid: bool,
}

/// The state of `/boot/kernel`, as far as it is known.
struct Model {
    /// Content of each block, if a transaction changed it: the byte that fills it, and true if it begins with the magic
    /// number.
    blocks: [Option<(u8, bool)>; KERNEL.len()],
    /// False once the journal has something that this model does not follow.
    exact: bool,
}

/// The changes of `/boot/kernel` that a transaction makes when it is committed.
#[derive(Default)]
struct Transaction {
    copies: Vec<(usize, (u8, bool))>,
    revoked: Vec<usize>,
}

impl Model {
    /// Index of a block of the kernel.
    fn index(&mut self, target: u64) -> Option<usize> {
        let found = KERNEL.iter().position(|block| u64::from(*block) == target);
        // Another block may be one that leads to the kernel.
        self.exact &= found.is_some();
        found
    }

    fn commit(&mut self, transaction: Transaction) {
        for (index, copy) in transaction.copies {
            self.blocks[index] = Some(copy);
        }
        for index in transaction.revoked {
            self.blocks[index] = None;
        }
    }
}

impl Target {
    fn number(self) -> u64 {
        match self {
            Self::Kernel(index) => KERNEL[usize::from(index) % KERNEL.len()].into(),
            Self::Block(block) => block.into(),
            Self::Any(block) => block,
        }
    }
}

/// The ring of blocks, and the next to be written.
struct Ring<'a> {
    disk: &'a mut Patched,
    next: usize,
    last: usize,
}

impl Ring<'_> {
    /// Offset on the disk of block `number` of the journal.
    fn offset(number: usize) -> usize {
        let run = EXTENTS.iter().find(|(first, _)| number >= *first);
        run.map_or(0, |(first, block)| (block + number - first) * BLOCK)
    }

    fn push(&mut self, block: Vec<u8>) {
        self.disk.write(Self::offset(self.next), block);
        self.next += 1;
        if self.next == self.last {
            self.next = 1;
        }
    }
}

impl Log {
    fn header(kind: u32, sequence: u32) -> Vec<u8> {
        let mut block = [MAGIC, kind, sequence].map(u32::to_be_bytes).concat();
        block.resize(BLOCK, 0);
        block
    }

    /// A descriptor of `tags`, without its checksum.
    fn descriptor(&self, tags: &[Tag], sequence: u32) -> Vec<u8> {
        let mut block = Self::header(DESCRIPTOR, sequence);
        let mut at = 12;
        for (index, tag) in tags.iter().enumerate() {
            let last = index + 1 == tags.len();
            let flags = u32::from(tag.escaped) | u32::from(tag.same_uuid) << 1 | u32::from(last) << 3;
            let target = tag.target.number();
            let (low, high) = (target as u32, (target >> 32) as u32);
            let mut bytes = low.to_be_bytes().to_vec();
            match self.checksums {
                Checksums::V3 => bytes.extend([flags, high, 0].map(u32::to_be_bytes).concat()),
                _ => {
                    bytes.extend(flags.to_be_bytes());
                    if self.wide {
                        bytes.extend(high.to_be_bytes());
                    }
                    if self.checksums == Checksums::V2 {
                        bytes.extend([0; 2]);
                    }
                }
            }
            if !tag.same_uuid {
                bytes.extend([0x11; 16]);
            }
            block[at..at + bytes.len()].copy_from_slice(&bytes);
            at += bytes.len();
        }
        block
    }

    fn revocation(&self, targets: &[Target], sequence: u32) -> Vec<u8> {
        let entries = targets.iter().map(|target| match (target.number(), self.wide) {
            (number, true) => number.to_be_bytes().to_vec(),
            (number, false) => (number as u32).to_be_bytes().to_vec(),
        });
        let entries = entries.collect::<Vec<_>>().concat();
        let mut block = Self::header(REVOKE, sequence);
        block[12..16].copy_from_slice(&(16 + entries.len() as u32).to_be_bytes());
        block[16..16 + entries.len()].copy_from_slice(&entries);
        block
    }

    /// Puts the checksum into a block that is not data.
    fn seal(&self, uuid: &[u8], block: &mut [u8]) {
        if self.checksums == Checksums::None {
            return;
        }
        let at = if block[7] == COMMIT as u8 { 16 } else { BLOCK - 4 };
        block[at..at + 4].fill(0);
        let crc = Crc::<u32>::new(&CRC_32_ISCSI);
        let mut digest = crc.digest();
        digest.update(uuid);
        digest.update(block);
        // jbd2 does without the final inversion.
        block[at..at + 4].copy_from_slice(&(!digest.finalize()).to_be_bytes());
    }

    /// Writes the journal to the disk of `seed`. Returns the content of the kernel then, unless it is unknown.
    ///
    /// # Panics
    /// If `seed` is another one.
    pub fn write(&self, seed: &Seed, disk: &mut Patched) -> Option<Vec<u8>> {
        let superblock = Ring::offset(0);
        let mut header = seed.bytes[superblock..superblock + BLOCK].to_vec();
        assert_eq!(header[..8], [MAGIC, 4].map(u32::to_be_bytes).concat());
        let uuid = header[0x30..0x40].to_vec();
        let last = BLOCKS - if self.fast_commits { FAST } else { 0 };
        let start = 1 + usize::from(self.start) % (last - 1);
        let checksums = match self.checksums {
            Checksums::None => 0,
            Checksums::V2 => 0x8,
            Checksums::V3 => 0x10,
        };
        let incompat = 1 | u32::from(self.wide) << 1 | checksums | u32::from(self.fast_commits) << 5;
        for (at, value) in [(0x18, self.sequence), (0x1c, start as u32), (0x28, incompat)] {
            header[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        disk.write(superblock, header);

        let (next, mut sequence, mut fill) = (start, self.sequence, 0);
        let mut ring = Ring { disk, next, last };
        let mut model = Model {
            blocks: [None; KERNEL.len()],
            exact: true,
        };
        let mut open = Transaction::default();
        let mut records = self.records.iter().take(MAX_RECORDS).peekable();
        while let Some(record) = records.next() {
            let (mut block, tags) = match record {
                Record::Descriptor(tags) if !tags.is_empty() => {
                    let tags = &tags[..tags.len().min(MAX_TAGS)];
                    (self.descriptor(tags, sequence), tags)
                }
                Record::Revoke(targets) => {
                    let targets = &targets[..targets.len().min(MAX_TAGS)];
                    for target in targets {
                        open.revoked.extend(model.index(target.number()));
                    }
                    (self.revocation(targets, sequence), &[][..])
                }
                Record::Commit => (Self::header(COMMIT, sequence), &[][..]),
                Record::Descriptor(_) | Record::Patch(..) => continue,
            };
            while let Some(Record::Patch(at, value)) =
                records.next_if(|next| matches!(next, Record::Patch(..)))
            {
                value.put(&mut block[usize::from(*at) % BLOCK..], true);
                model.exact = false;
            }
            self.seal(&uuid, &mut block);
            ring.push(block);
            for tag in tags {
                fill = u8::wrapping_add(fill, 1);
                let mut data = vec![fill; BLOCK];
                if tag.escaped {
                    data[..4].fill(0);
                }
                ring.push(data);
                let index = model.index(tag.target.number());
                open.copies
                    .extend(index.map(|index| (index, (fill, tag.escaped))));
            }
            if matches!(record, Record::Commit) {
                model.commit(std::mem::take(&mut open));
                sequence = sequence.wrapping_add(1);
            }
        }
        // The seed's own log ends here.
        ring.push(vec![0; BLOCK]);
        model.exact.then(|| content(seed, &model))
    }
}

/// The blocks of the kernel on the seed, with those that the model knows otherwise.
fn content(seed: &Seed, model: &Model) -> Vec<u8> {
    let start = KERNEL[0] as usize * BLOCK;
    let mut content = seed.bytes[start..start + KERNEL.len() * BLOCK].to_vec();
    for (block, change) in content.chunks_mut(BLOCK).zip(model.blocks) {
        if let Some((fill, escaped)) = change {
            block.fill(fill);
            if escaped {
                block[..4].copy_from_slice(&MAGIC.to_be_bytes());
            }
        }
    }
    content
}
