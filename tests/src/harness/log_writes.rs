//! dm-log-writes devices on the host: reconstruct a disk's content after a power loss at a mark.
//!
//! The kernel logs a write only once a later flush is complete, or if it was forced (FUA): the writes in the log before
//! a mark were durable when the mark was set (Documentation/admin-guide/device-mapper/log-writes.rst).

use super::context::TestContext;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAGIC: u64 = 0x006a_7366_7773_6872;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
const SECTOR: u64 = 512;

/// A block device that keeps a log of its writes.
#[derive(Debug)]
pub struct LoggedDisk<'s> {
    ctx: &'s TestContext,
    name: String,
    bytes: u64,
    /// Commands that remove it, in reverse order.
    undo: Vec<Vec<String>>,
}

impl<'s> LoggedDisk<'s> {
    /// Creates a device of `mebibytes` called `name`, whose log has a capacity of `log_mebibytes`.
    pub fn make(ctx: &'s TestContext, name: &str, mebibytes: u64, log_mebibytes: u64) -> Result<Self> {
        let bytes = mebibytes << 20;
        let mut disk = Self {
            ctx,
            name: format!("husk-{name}-{}", std::process::id()),
            bytes,
            undo: Vec::new(),
        };
        let mut loops = Vec::new();
        for (end, bytes) in [("data", bytes), ("log", log_mebibytes << 20)] {
            let path = disk.file(end);
            File::create(&path)?.set_len(bytes)?;
            let path = path.to_string_lossy();
            let device = disk.ctx.host(&["losetup", "--find", "--show", &path])?;
            let device = device.trim().to_owned();
            disk.later(&["losetup", "--detach", &device]);
            loops.push(device);
        }
        let sectors = bytes / SECTOR;
        let table = format!("0 {sectors} log-writes {} {}", loops[0], loops[1]);
        let name = disk.name.clone();
        disk.ctx.host(&["dmsetup", "create", &name, "--table", &table])?;
        disk.later(&["dmsetup", "remove", "--retry", &name]);
        Ok(disk)
    }

    /// Makes an ext4 filesystem on the device and mounts it at `folder`, which is created.
    pub fn mount(&mut self, folder: &Path) -> Result<()> {
        std::fs::create_dir(folder)?;
        let (device, folder) = (self.path(), folder.to_string_lossy());
        let device = device.to_string_lossy();
        self.ctx.host(&["mkfs.ext4", "-q", &device])?;
        self.ctx.host(&["mount", &device, &folder])?;
        self.later(&["umount", &folder]);
        Ok(())
    }

    /// Path of the device file.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/mapper/{}", self.name))
    }

    /// Writes a mark into the log.
    pub fn mark(&self, mark: &str) -> Result<()> {
        self.ctx
            .host(&["dmsetup", "message", &self.name, "0", "mark", mark])?;
        Ok(())
    }

    /// Removes the device; returns its log.
    pub fn into_log(mut self) -> Result<Log> {
        while let Some(words) = self.undo.pop() {
            self.ctx.host(&words)?;
        }
        let file = File::open(self.file("log"))?;
        Log::read(file, self.bytes)
    }

    fn later(&mut self, words: &[&str]) {
        self.undo
            .push(words.iter().map(|&word| word.to_owned()).collect());
    }

    fn file(&self, end: &str) -> PathBuf {
        self.ctx.path(&format!("{}.{end}", self.name))
    }
}

impl Drop for LoggedDisk<'_> {
    fn drop(&mut self) {
        // Removes the rest after a case that failed.
        while let Some(words) = self.undo.pop() {
            let _ = self.ctx.host(&words);
        }
    }
}

/// Writes in the order in which they became durable.
#[derive(Debug)]
pub struct Log {
    file: File,
    disk_bytes: u64,
    sector: u64,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    /// Position on the disk, in units of the log's sectors.
    at: u64,
    sectors: u64,
    flags: u64,
    /// Offset of the data in the log, in bytes.
    data: u64,
    mark: String,
}

impl Log {
    fn read(file: File, disk_bytes: u64) -> Result<Self> {
        let words = |at, n: usize| -> Result<Vec<u64>> {
            let mut raw = vec![0; n * 8];
            file.read_exact_at(&mut raw, at).context("the log ends early")?;
            Ok(raw
                .chunks_exact(8)
                .map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")))
                .collect())
        };
        let head = words(0, 4)?;
        ensure!(
            head[0] == MAGIC && head[1] == 1,
            "not a log of dm-log-writes: {head:x?}"
        );
        let sector = head[3] & 0xffff_ffff;
        ensure!(
            sector >= SECTOR && sector.is_power_of_two(),
            "sectors of {sector} bytes"
        );
        let (mut entries, mut next) = (Vec::new(), sector);
        for _ in 0..head[2] {
            let entry = words(next, 4)?;
            let mut mark = Vec::new();
            if entry[2] & MARK != 0 {
                mark.resize(usize::try_from(entry[3].min(sector))?, 0);
                file.read_exact_at(&mut mark, next + 32)?;
            }
            let data = next + sector;
            next = data;
            if entry[2] & DISCARD == 0 {
                next += entry[1] * sector;
            }
            entries.push(Entry {
                at: entry[0],
                sectors: entry[1],
                flags: entry[2],
                data,
                mark: String::from_utf8_lossy(&mark).trim_end_matches('\0').to_owned(),
            });
        }
        Ok(Self {
            file,
            disk_bytes,
            sector,
            entries,
        })
    }

    /// Number of writes before a mark, marks included.
    pub fn position(&self, mark: &str) -> Result<usize> {
        self.entries
            .iter()
            .position(|entry| entry.flags & MARK != 0 && entry.mark == mark)
            .with_context(|| format!("no mark {mark:?} among {} entries", self.entries.len()))
    }

    /// The content of the whole disk that was durable when `mark` was set.
    pub fn disk_at(&self, mark: &str) -> Result<Vec<u8>> {
        self.disk_before(self.position(mark)?)
    }

    /// The content of the whole disk after this many writes.
    pub fn disk_before(&self, end: usize) -> Result<Vec<u8>> {
        let mut disk = vec![0; usize::try_from(self.disk_bytes)?];
        for entry in &self.entries[..end] {
            let start = usize::try_from(entry.at * self.sector)?;
            let bytes = usize::try_from(entry.sectors * self.sector)?;
            let place = disk
                .get_mut(start..start + bytes)
                .with_context(|| format!("a write beyond the disk: {entry:?}"))?;
            if entry.flags & DISCARD == 0 {
                self.file.read_exact_at(place, entry.data)?;
            } else {
                place.fill(0);
            }
        }
        Ok(disk)
    }
}
