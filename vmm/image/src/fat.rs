//! FAT12, FAT16 and FAT32 through the `fatfs` crate.
//!
//! The crate does not check the fields of the boot sector, so [`check`] does that first. It does not detect loops in
//! cluster chains; the read budget of the extent ends them.

use std::io::{ErrorKind, Read};

use fatfs::{Dir, FileSystem, FsOptions};

use crate::source::{Cursor, Extent};
use crate::volume::{MAX_NAMES, Sink, Volume, VolumeError, normalise, stream_chunks};

/// A FAT filesystem, read only.
pub(crate) struct FatVolume {
    fs: FileSystem<Cursor>,
    uuid: String,
    label: String,
}

impl FatVolume {
    /// Opens the filesystem on `extent`.
    pub(crate) fn open(extent: Extent) -> Result<Self, VolumeError> {
        check(&extent)?;
        let fs = FileSystem::new(Cursor::new(extent), FsOptions::new()).map_err(failed)?;
        let id = fs.volume_id();
        let uuid = format!("{:04X}-{:04X}", id >> 16, id & 0xffff);
        let in_root = fs.read_volume_label_from_root_dir().ok().flatten();
        let label = in_root.unwrap_or_else(|| fs.volume_label()).trim_end().to_owned();
        Ok(Self { fs, uuid, label })
    }

    fn dir(&self, path: &str) -> Result<Dir<'_, Cursor>, VolumeError> {
        match path.trim_start_matches('/') {
            "" => Ok(self.fs.root_dir()),
            path => self.fs.root_dir().open_dir(path).map_err(failed),
        }
    }
}

impl Volume for FatVolume {
    fn uuid(&self) -> &str {
        &self.uuid
    }

    fn label(&self) -> &str {
        &self.label
    }

    fn list(&self, path: &str) -> Result<Vec<String>, VolumeError> {
        let path = normalise(path).ok_or(VolumeError::NotFound)?;
        let mut names = Vec::new();
        for entry in self.dir(&path)?.iter().take(MAX_NAMES) {
            names.push(entry.map_err(failed)?.file_name());
        }
        names.retain(|name| name != "." && name != "..");
        Ok(names)
    }

    fn size(&self, path: &str) -> Result<u64, VolumeError> {
        let path = normalise(path).ok_or(VolumeError::NotFound)?;
        let (dir, name) = path.rsplit_once('/').ok_or(VolumeError::NotFound)?;
        for entry in self.dir(dir)?.iter() {
            let entry = entry.map_err(failed)?;
            if entry.file_name().eq_ignore_ascii_case(name)
                || entry.short_file_name().eq_ignore_ascii_case(name)
            {
                return if entry.is_file() {
                    Ok(entry.len())
                } else {
                    Err(VolumeError::NotAFile)
                };
            }
        }
        Err(VolumeError::NotFound)
    }

    fn stream(&self, path: &str, size: u64, sink: &mut Sink<'_>) -> Result<(), VolumeError> {
        let path = normalise(path).ok_or(VolumeError::NotFound)?;
        let mut file = self
            .fs
            .root_dir()
            .open_file(path.trim_start_matches('/'))
            .map_err(failed)?;
        stream_chunks(size, sink, |buf| file.read(buf).map_err(failed))
    }
}

/// Converts errors of the crate: "not found" is an error kind, all others only have a text.
fn failed(error: std::io::Error) -> VolumeError {
    match error.kind() {
        ErrorKind::NotFound => VolumeError::NotFound,
        _ => VolumeError::Filesystem(error.to_string()),
    }
}

/// Rejects a boot sector whose areas overflow or exceed the partition (Microsoft's FAT specification, §3).
fn check(extent: &Extent) -> Result<(), VolumeError> {
    let bad = |why: &str| VolumeError::Filesystem(format!("the FAT boot sector is damaged: {why}"));
    let b: [u8; 64] = extent.bytes(0).ok_or_else(|| bad("it cannot be read"))?;
    let u16_at = |at: usize| u64::from(u16::from_le_bytes([b[at], b[at + 1]]));
    let u32_at = |at: usize| u64::from(u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]));
    let first_nonzero = |a: u64, b: u64| if a != 0 { a } else { b };
    let (sector, per_cluster, reserved, fats) = (u16_at(11), u64::from(b[13]), u16_at(14), u64::from(b[16]));
    let (root_entries, fat_size) = (u16_at(17), first_nonzero(u16_at(22), u32_at(36)));
    let total = first_nonzero(u16_at(19), u32_at(32));
    if !matches!(sector, 512 | 1024 | 2048 | 4096) || per_cluster == 0 || !(1..=2).contains(&fats) {
        return Err(bad("sector size, cluster size or number of FATs"));
    }
    // Images made by copying may lack the last, unused sectors; a FAT or root directory outside is never sound.
    let data = reserved + fats * fat_size + (root_entries * 32).div_ceil(sector);
    if data >= total || data * sector > extent.len() || fat_size * sector * 8 > u64::from(u32::MAX) {
        return Err(bad("its areas do not fit the partition"));
    }
    // The first two entries of the table are reserved; 12 bits each is the least a table can have.
    if fat_size * sector * 8 / 32 < 2 {
        return Err(bad("its allocation table is too small"));
    }
    Ok(())
}
