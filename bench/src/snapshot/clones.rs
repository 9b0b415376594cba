//! Memory of the clones of one guest.

use super::case::{Case, Running};
use crate::cases::BenchCase;
use crate::{message, smaps};
use anyhow::{Context, Result, ensure};
use std::path::Path;

/// Name of the file with a guest's memory in a snapshot of Husk.
const MEMORY: &str = "memory";

/// Reports the memory of `clones`, which all run: that of each, and that of all with the file that they share. The file
/// counts with its whole size, as if all of it were cached. All values are reported at the end, or none.
pub fn report(clones: &[Running], saved: &Path) -> Result<()> {
    let file = saved.join(MEMORY).metadata().context("the snapshot's memory")?;
    let each = clones.iter().map(unshared_mib).collect::<Result<Vec<_>>>()?;
    for (number, [clone, vmm]) in (1..).zip(&each) {
        let values = [("clone_mib", "MiB", *clone), ("clone_vmm_mib", "MiB", *vmm)];
        message::values("snapshot", Case::Husk.name(), number, values);
    }
    let file = file.len() as f64 / f64::from(1 << 20);
    let all: f64 = each.iter().map(|[clone, _]| clone).sum();
    let values = [
        ("clones_file_mib", "MiB", file),
        ("clones_mib", "MiB", all + file),
    ];
    message::values("snapshot", Case::Husk.name(), 1, values);
    Ok(())
}

/// The memory of a clone, and of its VMM alone.
fn unshared_mib(clone: &Running) -> Result<[f64; 2]> {
    let vmm = clone.started.group.find("husk-vmm")?;
    let of_vmm = mib(smaps::unshared(vmm)?);
    let mut of_clone = of_vmm;
    let monitors = clone.started.companions(vmm)?;
    ensure!(!monitors.is_empty(), "a clone has no monitor");
    for pid in monitors {
        of_clone += mib(smaps::unshared(pid)?);
    }
    Ok([of_clone, of_vmm])
}

fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}
