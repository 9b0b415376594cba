//! The selected boot entry, before its files are opened.

use crate::disk::{FileRef, PartitionedDisk};

/// Largest kernel, in bytes.
pub(crate) const MAX_KERNEL: u64 = 256 << 20;
/// Largest initrd (one file), in bytes.
pub(crate) const MAX_INITRD: u64 = 1 << 30;
/// Initrds of one entry.
pub(crate) const MAX_INITRDS: usize = 64;
/// Longest command line, in bytes; x86 kernels take 2,047.
pub(crate) const MAX_COMMAND_LINE: usize = 64 << 10;

/// Kernel, initrds and command line of a boot entry.
#[derive(Clone, Debug, Default)]
pub(crate) struct SelectedEntry {
    pub title: String,
    /// Source: partition, file, entry.
    pub source: String,
    pub command_line: String,
    pub kernel: FileRef,
    pub initrds: Vec<FileRef>,
}

/// Returns `file` if it exists and is not too large; the error names its location.
pub(crate) fn find_file(disk: &PartitionedDisk, file: &FileRef, what: &str) -> Result<FileRef, String> {
    let limit = if what == "kernel" { MAX_KERNEL } else { MAX_INITRD };
    let place = || format!("{what} {} on {}", file.path, disk.describe(file.volume));
    match disk.size(file) {
        Ok(size) if size > limit => Err(format!("{}: is {size} bytes, more than {limit}", place())),
        Ok(0) => Err(format!("{}: is empty", place())),
        Ok(_) => Ok(file.clone()),
        Err(e) => Err(format!("{}: {e}", place())),
    }
}
