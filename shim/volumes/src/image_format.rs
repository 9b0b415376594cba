//! Detects image formats by their first bytes. Only called for images that no guest has written.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::VolumeFault;

/// Format of a disk image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ImageFormat {
    Raw,
    /// The confined VMM verifies that the image is valid and names no backing file.
    Qcow2,
}

/// Formats that are recognised and refused: name, offset and magic.
const FOREIGN: [(&str, usize, &[u8]); 8] = [
    ("vmdk", 0, b"KDMV"),
    ("vhdx", 0, b"vhdxfile"),
    ("vpc", 0, b"conectix"),
    ("qed", 0, b"QED\0"),
    ("vdi", 0x40, &[0x7f, 0x10, 0xda, 0xbe]),
    ("gzip", 0, &[0x1f, 0x8b, 0x08]),
    ("xz", 0, b"\xfd7zXZ\0"),
    ("zstd", 0, &[0x28, 0xb5, 0x2f, 0xfd]),
];

/// Distinguishes raw from qcow2.
pub(super) fn probe(image: &File, path: &Path) -> Result<ImageFormat, VolumeFault> {
    let mut head = [0; 512];
    let length = image.read_at(&mut head, 0).map_err(VolumeFault::io(path))?;
    let head = &head[..length];
    if head.starts_with(b"QFI\xfb") {
        return Ok(ImageFormat::Qcow2);
    }
    for (format, offset, magic) in FOREIGN {
        if head.get(offset..).is_some_and(|head| head.starts_with(magic)) {
            return Err(VolumeFault::UnsupportedFormat {
                path: path.to_owned(),
                format,
            });
        }
    }
    Ok(ImageFormat::Raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(head: &[u8]) -> Result<ImageFormat, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, head).unwrap();
        probe(&File::open(&path).unwrap(), Path::new("image")).map_err(|fault| fault.to_string())
    }

    #[test]
    fn formats_are_detected_by_their_magic() {
        assert_eq!(of(b""), Ok(ImageFormat::Raw));
        assert_eq!(of(&[0xeb; 512]), Ok(ImageFormat::Raw));
        assert_eq!(of(b"QFI\xfb\0\0\0\x03"), Ok(ImageFormat::Qcow2));
        for (format, offset, magic) in FOREIGN {
            let mut head = vec![0; 512];
            head[offset..offset + magic.len()].copy_from_slice(magic);
            assert_eq!(
                of(&head).unwrap_err(),
                format!("image: unsupported image format: {format}")
            );
        }
    }
}
