//! Disk images for the parsers of husk-image and husk-disk: built in code or unpacked from seeds, then patched.

use std::fs::File;
use std::io::{self, Cursor, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use arbitrary::Arbitrary;
use husk_image::{BootEntry, BootFiles, FindError, ReadAt};

/// Read budget of a search in bytes: a thousandth of what the VMM allows.
const BUDGET: u64 = 2 << 20;
/// Bytes of a file that are read: a damaged one may have any size.
const MAX_FILE: usize = 512 << 10;

/// An empty file in memory.
///
/// # Panics
/// If the kernel refuses it.
#[must_use]
pub fn memfd() -> File {
    let fd = rustix::fs::memfd_create(c"fuzz", rustix::fs::MemfdFlags::CLOEXEC);
    File::from(fd.expect("memfd"))
}

/// A file in memory with this content.
///
/// # Panics
/// If the kernel refuses it.
#[must_use]
pub fn file(content: &[u8]) -> File {
    let file = memfd();
    file.write_all_at(content, 0).expect("a write to a memfd");
    file
}

/// A change of a few bytes.
#[derive(Arbitrary, Clone, Debug)]
pub struct Patch {
    /// Index among the sectors that are not empty.
    sector: u16,
    at: u16,
    value: Value,
}

/// New content.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Value {
    /// One byte.
    Byte(u8),
    /// 16 bits.
    Half(u16),
    /// 32 bits.
    Word(u32),
    /// 64 bits.
    Long(u64),
    /// A bit that is inverted.
    Flip(u8),
    /// A word of all ones, shifted: often a limit.
    Limit(u8),
}

impl Value {
    /// Writes the value to the start of `bytes`, as far as it fits.
    pub fn put(self, bytes: &mut [u8], big_endian: bool) {
        let (value, len) = match self {
            Self::Byte(value) => (u64::from(value), 1),
            Self::Half(value) => (u64::from(value), 2),
            Self::Word(value) => (u64::from(value), 4),
            Self::Long(value) => (value, 8),
            Self::Limit(shift) => (u64::from(u32::MAX >> (shift % 32)), 4),
            Self::Flip(bit) => {
                if let Some(byte) = bytes.first_mut() {
                    *byte ^= 1 << (bit % 8);
                }
                return;
            }
        };
        let mut encoded = value.to_le_bytes();
        let encoded = &mut encoded[..len];
        if big_endian {
            encoded.reverse();
        }
        for (byte, value) in bytes.iter_mut().zip(encoded) {
            *byte = *value;
        }
    }
}

/// An image, and its sectors that are not empty.
#[derive(Debug)]
pub struct Seed {
    /// The image.
    pub bytes: Vec<u8>,
    used: Vec<usize>,
}

impl Seed {
    /// A seed of an image.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        let sectors = bytes.chunks(512).enumerate();
        let used = sectors.filter(|(_, sector)| sector.iter().any(|byte| *byte != 0));
        let used = used.map(|(number, _)| number * 512).collect();
        Self { bytes, used }
    }

    /// Unpacks a file of `seeds/`.
    ///
    /// # Panics
    /// If it is damaged.
    #[must_use]
    pub fn unpack(sparse: &[u8]) -> Self {
        let (words, _) = sparse.as_chunks::<4>();
        let word = |at: usize| u32::from_le_bytes(words[at]) as usize;
        let mut bytes = vec![0; word(0)];
        let mut at = 1;
        while at < words.len() {
            let (first, count) = (word(at) * 512, word(at + 1) * 512);
            at += 2;
            bytes[first..first + count].copy_from_slice(&sparse[at * 4..at * 4 + count]);
            at += count / 4;
        }
        Self::new(bytes)
    }

    /// The offset of `marker`, which is in the image once.
    ///
    /// # Panics
    /// If it is not there.
    #[must_use]
    pub fn position(&self, marker: &[u8]) -> usize {
        let mut windows = self.bytes.windows(marker.len());
        windows.position(|bytes| bytes == marker).expect("the marker")
    }
}

/// A seed as a disk, with other content in some places.
pub struct Patched {
    seed: &'static Seed,
    patches: Vec<(usize, Vec<u8>)>,
    len: usize,
}

impl Patched {
    /// The disk of `seed` with `patches` in sectors that are not empty.
    #[must_use]
    pub fn new(seed: &'static Seed, patches: &[Patch]) -> Self {
        let mut disk = Self {
            seed,
            patches: Vec::new(),
            len: seed.bytes.len(),
        };
        for Patch { sector, at, value } in patches {
            let sector = seed.used[usize::from(*sector) % seed.used.len()];
            let at = sector + usize::from(*at) % 512;
            let mut bytes = [0; 8];
            let len = bytes.len().min(disk.len - at);
            disk.copy(at, &mut bytes[..len]);
            value.put(&mut bytes[..len], false);
            disk.write(at, bytes[..len].to_vec());
        }
        disk
    }

    /// Replaces the bytes at `at`.
    pub fn write(&mut self, at: usize, bytes: Vec<u8>) {
        self.patches.push((at, bytes));
    }

    /// Cuts the disk off.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn copy(&self, offset: usize, buf: &mut [u8]) {
        buf.copy_from_slice(&self.seed.bytes[offset..offset + buf.len()]);
        let end = offset + buf.len();
        for (at, bytes) in &self.patches {
            let (from, to) = (offset.max(*at), end.min(at + bytes.len()));
            if from < to {
                buf[from - offset..to - offset].copy_from_slice(&bytes[from - at..to - at]);
            }
        }
    }
}

impl ReadAt for Patched {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.len as u64) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.copy(offset as usize, buf);
        Ok(())
    }

    fn size(&self) -> u64 {
        self.len as u64
    }
}

/// A FAT filesystem of `kib` KiB with these files.
///
/// # Panics
/// If they do not fit or have names that FAT has not.
#[must_use]
pub fn fat(kib: usize, tree: &[(&str, &[u8])]) -> Vec<u8> {
    let mut disk = Cursor::new(vec![0; kib << 10]);
    let mut options = fatfs::FormatVolumeOptions::new()
        .volume_id(0xabcd_1234)
        .volume_label(*b"EFI        ")
        .bytes_per_cluster(512);
    if kib < 34 << 10 {
        options = options.max_root_dir_entries(64);
    } else {
        options = options.fat_type(fatfs::FatType::Fat32);
    }
    fatfs::format_volume(&mut disk, options).expect("a filesystem");
    {
        let fs = fatfs::FileSystem::new(&mut disk, fatfs::FsOptions::new()).expect("a filesystem");
        for (path, content) in tree {
            let mut dir = fs.root_dir();
            let mut parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
            let name = parts.pop().expect("a name");
            for part in parts {
                dir = dir.create_dir(part).expect("a directory");
            }
            let mut file = dir.create_file(name).expect("a file");
            file.write_all(content).expect("room for a file");
        }
    }
    disk.into_inner()
}

/// The content of a file of a boot entry, or nothing if it cannot be read or is too large.
pub fn read(files: &BootFiles) -> Option<Vec<u8>> {
    let mut content = Vec::new();
    let done = files.read_into(&mut |piece| {
        content.extend_from_slice(piece);
        match content.len() > MAX_FILE {
            true => Err(io::Error::other("large")),
            false => Ok(()),
        }
    });
    if done.is_err() {
        return None;
    }
    assert_eq!(content.len() as u64, files.size(), "a file that is read is whole");
    Some(content)
}

/// Searches a disk and reads all that is found.
///
/// # Panics
/// If the result breaks a promise of husk-image.
pub fn search(disk: impl ReadAt + 'static) -> Result<BootEntry, FindError> {
    let found = husk_image::testing::find_within(Arc::new(disk), BUDGET);
    match &found {
        Ok(entry) => {
            assert!(!entry.command_line.contains(['\0', '\n', '\r']));
            assert!(entry.kernel().size() > 0);
            for files in std::iter::once(entry.kernel()).chain(entry.initrd()) {
                let _ = read(files);
            }
        }
        Err(error) => {
            assert!(error.to_string().len() < 4 << 20);
        }
    }
    found
}
