//! The ext superblock: checks it before `ext4-view` uses it, and masks features that `ext4-view` rejects.

use crc::{CRC_32_ISCSI, Crc};

use crate::source::Extent;
use crate::volume::VolumeError;

/// Offset of the superblock in bytes.
pub(crate) const SUPERBLOCK_START: u64 = 1024;
/// Its size in bytes.
pub(crate) const SUPERBLOCK_SIZE: usize = 1024;

/// Groups read; at the usual 128 MiB each, 128 TiB.
const MAX_GROUPS: u64 = 1 << 20;

const FEATURE_INCOMPAT: usize = 0x60;
const FEATURE_RO_COMPAT: usize = 0x64;
const CHECKSUM: usize = 0x3fc;

const INCOMPAT_RECOVER: u32 = 0x4;
const INCOMPAT_64BIT: u32 = 0x80;
const INCOMPAT_MMP: u32 = 0x100;
const INCOMPAT_EA_INODE: u32 = 0x400;
const RO_COMPAT_METADATA_CSUM: u32 = 0x400;

const CRC32C: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// CRC32C as ext4 keeps it: without the final inversion.
pub(crate) fn crc32c(parts: &[&[u8]]) -> u32 {
    let mut digest = CRC32C.digest();
    parts.iter().for_each(|part| digest.update(part));
    !digest.finalize()
}

/// A checked superblock, which fits the extent of the filesystem.
#[derive(Debug)]
pub(crate) struct Superblock {
    bytes: [u8; SUPERBLOCK_SIZE],
    /// Block size in bytes: 1 KiB to 64 KiB.
    pub block_size: u64,
    /// Blocks in the filesystem.
    pub blocks: u64,
    /// Inode size in bytes.
    pub inode_size: u64,
}

impl Superblock {
    /// Reads and checks the superblock of the filesystem on `extent`.
    pub(crate) fn read(extent: &Extent) -> Result<Self, VolumeError> {
        let bytes = extent.bytes(SUPERBLOCK_START);
        Self::parse(bytes.ok_or_else(|| bad("it cannot be read"))?, extent.len())
    }

    /// Checks `bytes`, the superblock of a filesystem on `len` bytes.
    pub(crate) fn parse(bytes: [u8; SUPERBLOCK_SIZE], len: u64) -> Result<Self, VolumeError> {
        let mut sb = Self {
            bytes,
            block_size: 0,
            blocks: 0,
            inode_size: 0,
        };
        let log_block_size = sb.u32(0x18);
        if log_block_size > 6 {
            return Err(bad("block size"));
        }
        sb.block_size = 1024 << log_block_size;
        let wide = sb.incompat() & INCOMPAT_64BIT != 0;
        sb.blocks = u64::from(sb.u32(0x4)) | if wide { u64::from(sb.u32(0x150)) << 32 } else { 0 };
        if sb.u32(0x150) != 0 && !wide {
            return Err(bad("a 64-bit size without the 64bit feature"));
        }
        if sb.blocks.checked_mul(sb.block_size).is_none_or(|size| size > len) {
            return Err(VolumeError::Filesystem(format!(
                "the filesystem is larger than its partition ({} blocks of {} bytes): the image is truncated or damaged",
                sb.blocks, sb.block_size
            )));
        }
        let (first, per_group) = (u64::from(sb.u32(0x14)), u64::from(sb.u32(0x20)));
        if first >= sb.blocks || per_group == 0 || (sb.blocks - first).div_ceil(per_group) > MAX_GROUPS {
            return Err(bad("block groups"));
        }
        if wide && !(64..=1024).contains(&sb.u16(0xfe)) {
            return Err(bad("group descriptor size"));
        }
        sb.inode_size = u64::from(sb.u16(0x58));
        if sb.inode_size < 128 || !sb.inode_size.is_power_of_two() || sb.inode_size > sb.block_size {
            return Err(bad("inode size (or a revision older than ext2's first)"));
        }
        Ok(sb)
    }

    /// True if the journal has changes that are not in the filesystem yet.
    pub(crate) fn needs_recovery(&self) -> bool {
        self.incompat() & INCOMPAT_RECOVER != 0
    }

    /// Inode number of the journal, if it is among the first ones, as it always is.
    pub(crate) fn journal_inode(&self) -> Option<u64> {
        let number = self.u32(0xe0);
        (1..=self.u32(0x28))
            .contains(&number)
            .then_some(u64::from(number))
    }

    /// First byte of the first group's descriptor.
    pub(crate) fn first_descriptor(&self) -> u64 {
        // The block behind the superblock's. With clusters, `s_first_data_block` is 0 for every block size.
        (SUPERBLOCK_START / self.block_size + 1) * self.block_size
    }

    /// The superblock without features that matter to a writer only: a journal (dealt with before), protection
    /// against a second mount, attributes in inodes of their own. `ext4-view` refuses the last two and replays
    /// the first without wrapping at the journal's end.
    pub(crate) fn for_reading(&self) -> [u8; SUPERBLOCK_SIZE] {
        let mut bytes = self.bytes;
        let checked = self.u32(FEATURE_RO_COMPAT) & RO_COMPAT_METADATA_CSUM != 0;
        let sound = checked && crc32c(&[&bytes[..CHECKSUM]]) == self.u32(CHECKSUM);
        // Small inodes have room for half a checksum only, which `ext4-view` does not know: it then must not look.
        if checked && self.inode_size == 128 {
            let ro_compat = self.u32(FEATURE_RO_COMPAT) & !RO_COMPAT_METADATA_CSUM;
            bytes[FEATURE_RO_COMPAT..FEATURE_RO_COMPAT + 4].copy_from_slice(&ro_compat.to_le_bytes());
        }
        let incompat = self.incompat() & !(INCOMPAT_RECOVER | INCOMPAT_MMP | INCOMPAT_EA_INODE);
        bytes[FEATURE_INCOMPAT..FEATURE_INCOMPAT + 4].copy_from_slice(&incompat.to_le_bytes());
        if sound {
            let sum = crc32c(&[&bytes[..CHECKSUM]]);
            bytes[CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
        }
        bytes
    }

    /// First byte of an inode, from the descriptor of its group. `read` reads from the filesystem. `None` if that
    /// fails, or the descriptors are not with the first (`meta_bg`).
    pub(crate) fn inode_location(
        &self,
        number: u64,
        read: impl Fn(u64, &mut [u8]) -> Option<()>,
    ) -> Option<u64> {
        const INCOMPAT_META_BG: u32 = 0x10;
        let per_group = u64::from(self.u32(0x28));
        let (group, index) = (
            number.checked_sub(1)?.checked_div(per_group)?,
            (number - 1) % per_group,
        );
        if group > 0 && self.incompat() & INCOMPAT_META_BG != 0 {
            return None;
        }
        let descriptor_size = match self.is_64bit() {
            true => u64::from(self.u16(0xfe)),
            false => 32,
        };
        let descriptor = self.first_descriptor() + group.checked_mul(descriptor_size)?;
        let word = |at: u64| {
            let mut bytes = [0; 4];
            read(descriptor.checked_add(at)?, &mut bytes)?;
            Some(u64::from(u32::from_le_bytes(bytes)))
        };
        let high = if self.is_64bit() { word(0x28)? } else { 0 };
        let table = (high << 32 | word(8)?).checked_mul(self.block_size)?;
        table.checked_add(index.checked_mul(self.inode_size)?)
    }

    pub(crate) fn incompat(&self) -> u32 {
        self.u32(FEATURE_INCOMPAT)
    }

    /// True if block numbers have 64 bits.
    pub(crate) fn is_64bit(&self) -> bool {
        self.incompat() & INCOMPAT_64BIT != 0
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    fn u32(&self, at: usize) -> u32 {
        let b = &self.bytes[at..at + 4];
        u32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }
}

fn bad(what: &str) -> VolumeError {
    VolumeError::Filesystem(format!("the ext superblock is damaged: {what}"))
}
