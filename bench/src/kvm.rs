//! KVM's own statistics of a guest, in debugfs.

use super::group::Group;
use anyhow::Result;
use std::path::Path;

/// Folder with a subfolder for each guest, named `THREAD-DESCRIPTOR` after the thread that created it and its
/// descriptor.
const COUNTERS: &str = "/sys/kernel/debug/kvm";

/// Number of VM exits of a cgroup's guests; none if debugfs is not mounted.
pub fn exits(group: &Group) -> Result<Option<u64>> {
    let Ok(folders) = Path::new(COUNTERS).read_dir() else {
        return Ok(None);
    };
    let threads = group.threads()?;
    let mut exits = None;
    for folder in folders.flatten() {
        let name = folder.file_name().to_string_lossy().into_owned();
        let thread = name.split_once('-').and_then(|(thread, _)| thread.parse().ok());
        if thread.is_some_and(|thread| threads.contains(&thread)) {
            let count = std::fs::read_to_string(folder.path().join("exits"))?;
            *exits.get_or_insert(0) += count.trim().parse::<u64>()?;
        }
    }
    Ok(exits)
}
