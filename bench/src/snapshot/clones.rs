//! Memory of the clones of one guest.

use super::case::{Case, Running};
use super::inside::measured;
use crate::smaps;
use anyhow::{Context, Result, ensure};
use std::path::Path;

/// Name of the file with a guest's memory in a snapshot of Husk.
const MEMORY: &str = "memory";

/// Reports the memory of `clones`, which all run: that of each, and that of all with the file that they share. The file
/// counts with its whole size, as if all of it were cached.
pub fn report(clones: &[Running], saved: &Path) -> Result<()> {
    let file = saved.join(MEMORY).metadata().context("the snapshot's memory")?;
    let mut all = 0.0;
    for (number, clone) in (1..).zip(clones) {
        let group = &clone.started.group;
        let vmm = group.find("husk-vmm")?;
        let of_vmm = mib(smaps::unshared(vmm)?);
        let mut of_clone = of_vmm;
        let monitors: Vec<u32> = group.pids()?.into_iter().filter(|pid| *pid != vmm).collect();
        ensure!(!monitors.is_empty(), "a clone has no monitor");
        for pid in monitors {
            of_clone += mib(smaps::unshared(pid)?);
        }
        measured(Case::Husk, "clone_mib", "MiB", of_clone, number);
        measured(Case::Husk, "clone_vmm_mib", "MiB", of_vmm, number);
        all += of_clone;
    }
    let file = file.len() as f64 / f64::from(1 << 20);
    measured(Case::Husk, "clones_file_mib", "MiB", file, 1);
    measured(Case::Husk, "clones_mib", "MiB", all + file, 1);
    Ok(())
}

fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}
