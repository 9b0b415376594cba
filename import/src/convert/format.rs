//! Formats of images, by their first bytes: that of an import is what the server sent, and no guest has written it yet.

/// First bytes that are looked at.
pub const HEAD: usize = 512;

/// The format that the first bytes indicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Raw,
    Qcow2,
    /// gzip or zstd.
    Compressed,
    Xz,
    /// A format that is not converted: its name, and what to do.
    Foreign(&'static str, &'static str),
}

/// The remedy for disks in other formats.
const QEMU_IMG: &str = "convert it with `qemu-img convert -O qcow2`";
/// The remedy for archives and other compressors.
const UNPACK: &str = "unpack it, and compress the disk with gzip, xz or zstd if at all";

/// Formats, each with the offset of its magic bytes.
const MAGIC: [(usize, &[u8], Format); 18] = [
    (0, b"QFI\xfb", Format::Qcow2),
    (0, &[0x1f, 0x8b], Format::Compressed),
    (0, &[0x28, 0xb5, 0x2f, 0xfd], Format::Compressed),
    (0, b"\xfd7zXZ\0", Format::Xz),
    (0, b"KDMV", Format::Foreign("vmdk", QEMU_IMG)),
    (0, b"COWD", Format::Foreign("vmdk", QEMU_IMG)),
    (0, b"# Disk DescriptorFile", Format::Foreign("vmdk", QEMU_IMG)),
    (0, b"vhdxfile", Format::Foreign("vhdx", QEMU_IMG)),
    (0, b"conectix", Format::Foreign("vpc", QEMU_IMG)),
    (0x40, &[0x7f, 0x10, 0xda, 0xbe], Format::Foreign("vdi", QEMU_IMG)),
    (0, b"QED\0", Format::Foreign("qed", QEMU_IMG)),
    (0, b"WithoutFreeSpace", Format::Foreign("parallels", QEMU_IMG)),
    (0, b"WithouFreSpacExt", Format::Foreign("parallels", QEMU_IMG)),
    (0, b"BZh", Format::Foreign("bzip2", UNPACK)),
    (0, b"PK\x03\x04", Format::Foreign("zip", UNPACK)),
    (0, b"7z\xbc\xaf\x27\x1c", Format::Foreign("7z", UNPACK)),
    (0, &[0x04, 0x22, 0x4d, 0x18], Format::Foreign("lz4", UNPACK)),
    (257, b"ustar", Format::Foreign("tar", UNPACK)),
];

impl Format {
    /// Detects the format by the first [`HEAD`] bytes, or all of a shorter image.
    pub fn of(head: &[u8]) -> Format {
        // A skippable frame of zstd (RFC 8878, 3.1.2), with which files begin that were compressed in parallel.
        if let [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] = head {
            return Format::Compressed;
        }
        let found = MAGIC
            .iter()
            .find(|(offset, magic, _)| head.get(*offset..).is_some_and(|head| head.starts_with(magic)));
        found.map_or(Format::Raw, |(_, _, format)| *format)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_first_bytes() {
        for (offset, magic, format) in MAGIC {
            let mut head = vec![0; HEAD];
            head[offset..offset + magic.len()].copy_from_slice(magic);
            assert_eq!(Format::of(&head), format);
            assert_eq!(Format::of(&head[..offset + magic.len() - 1]), Format::Raw);
        }
        for raw in [&[][..], &[0xeb; HEAD], &[0; HEAD]] {
            assert_eq!(Format::of(raw), Format::Raw);
        }
    }
}
