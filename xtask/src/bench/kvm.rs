//! What KVM counts of a guest by itself, in debugfs, whoever looks.

use super::group::Group;
use anyhow::Result;
use std::path::Path;

/// A folder for each guest, called after the thread that made it and its descriptor: `THREAD-DESCRIPTOR`.
const COUNTERS: &str = "/sys/kernel/debug/kvm";

/// Number of VM exits of a group's guests; none where debugfs is not mounted.
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
