//! Detects the content of a partition by magic numbers.

use crate::source::Extent;

/// Content of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FsKind {
    /// ext2, ext3 or ext4.
    Ext(&'static str),
    /// FAT12, FAT16 or FAT32.
    Fat,
    /// A known format that this crate does not read.
    Other(&'static str),
    /// Unknown.
    Unknown,
}

impl FsKind {
    /// Name for messages; that of blkid if it has one.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext(name) | Self::Other(name) => name,
            Self::Fat => "vfat",
            Self::Unknown => "no known filesystem",
        }
    }
}

/// Offset, magic bytes and name.
const MAGICS: [(u64, &[u8], &str); 24] = [
    (0, b"XFSB", "xfs"),
    (0x1_0040, b"_BHRfS_M", "btrfs"),
    (0, b"LUKS\xba\xbe", "LUKS-encrypted"),
    (0x200, b"LABELONE", "LVM physical volume"),
    (0, b"LABELONE", "LVM physical volume"),
    (0x400, b"LABELONE", "LVM physical volume"),
    (0x600, b"LABELONE", "LVM physical volume"),
    (0x1000, b"\xfc\x4e\x2b\xa9", "Linux RAID member"),
    (0, b"\xfc\x4e\x2b\xa9", "Linux RAID member"),
    (0, b"hsqs", "squashfs"),
    (0x400, b"\xe2\xe1\xf5\xe0", "erofs"),
    (0x400, b"\x10\x20\xf5\xf2", "f2fs"),
    (0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca", "bcachefs"),
    (0x1_0034, b"ReIsEr", "reiserfs"),
    (0x8000, b"JFS1", "jfs"),
    (0x8001, b"CD001", "iso9660"),
    (3, b"NTFS    ", "ntfs"),
    (3, b"EXFAT   ", "exfat"),
    (0xff6, b"SWAPSPACE2", "swap"),
    (0, b"QFI\xfb", "qcow2 image (attached as raw)"),
    (0, b"KDMV", "vmdk image (attached as raw)"),
    (0, b"vhdxfile", "vhdx image (attached as raw)"),
    (0, b"conectix", "vhd image (attached as raw)"),
    (0, b"\xfd7zXZ\0", "xz-compressed image"),
];

/// Detects the content of `extent`.
pub(crate) fn probe(extent: &Extent) -> FsKind {
    if let Some(name) = ext(extent) {
        return FsKind::Ext(name);
    }
    for (offset, magic, name) in MAGICS {
        let mut bytes = [0; 10];
        let bytes = &mut bytes[..magic.len()];
        if extent.read_at(offset, bytes).is_ok() && bytes == magic {
            return FsKind::Other(name);
        }
    }
    if is_fat(extent) {
        FsKind::Fat
    } else {
        FsKind::Unknown
    }
}

fn ext(extent: &Extent) -> Option<&'static str> {
    if extent.bytes(0x438) != Some([0x53, 0xef]) {
        return None;
    }
    let flags = |at| extent.bytes(at).map_or(0, u32::from_le_bytes);
    const HAS_JOURNAL: u32 = 4;
    // Extents, 64bit, flex_bg and what came later; huge_file, gdt_csum and what came later.
    let ext4 = flags(0x460) & !0x1f != 0 || flags(0x464) & !0x7 != 0;
    Some(match (ext4, flags(0x45c) & HAS_JOURNAL != 0) {
        (true, _) => "ext4",
        (false, true) => "ext3",
        (false, false) => "ext2",
    })
}

/// A FAT boot sector: signature, jump, and the type's name where Microsoft's specification puts it.
pub(crate) fn is_fat(extent: &Extent) -> bool {
    let Some(sector) = extent.bytes::<512>(0) else {
        return false;
    };
    let named = sector[0x36..0x39] == *b"FAT" || sector[0x52..0x57] == *b"FAT32";
    sector[510..] == [0x55, 0xaa] && matches!(sector[0], 0xeb | 0xe9) && named
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::source::Budget;

    #[test]
    fn filesystems_are_named_by_their_magic() {
        for (offset, magic, name) in MAGICS {
            let mut disk = vec![0; 0x1_1000];
            disk[offset as usize..][..magic.len()].copy_from_slice(magic);
            let extent = Extent::whole(Arc::new(disk), Budget::new(1 << 20));
            assert_eq!(probe(&extent), FsKind::Other(name));
        }
        let empty = Extent::whole(Arc::new(vec![0; 100]), Budget::new(1 << 20));
        assert_eq!(probe(&empty), FsKind::Unknown);
    }
}
