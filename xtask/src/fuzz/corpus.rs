//! The inputs of a target: those of this checkout's runs, and the small set under version control.

use super::confinement::confined;
use crate::checkout;
use crate::finish::finish;
use crate::progress::ends_with_this_process;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Most inputs of a target under version control, and their total length in bytes.
const STORED: (usize, u64) = (24, 32 << 10);

/// Folder of the inputs that runs of this checkout add.
pub fn working(target: &str) -> Result<PathBuf> {
    checkout::folder(checkout::target().join("fuzz/corpus").join(target))
}

/// Folder of the inputs under version control.
pub fn stored(target: &str) -> PathBuf {
    checkout::root().join("fuzz/corpus").join(target)
}

/// Replaces the inputs of [`working`] by a minimal set with the same coverage as all inputs have, and those of [`stored`]
/// by some of them. Returns a summary.
pub fn minimise(program: &Path, target: &str) -> Result<String> {
    let merged = tempfile::tempdir()?;
    let (working, stored) = (working(target)?, checkout::folder(stored(target))?);
    confined(program, &[merged.path()], |mut command| {
        command
            .args(["-set_cover_merge=1", "-max_len=4096"])
            .args([merged.path(), &working, &stored])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        ends_with_this_process(&mut command);
        finish(&mut command)
    })?;
    let mut inputs = inputs(merged.path())?;
    inputs.sort();
    ensure!(!inputs.is_empty(), "libFuzzer has kept no input of {target}");
    replace(&working, inputs.iter().map(|(_, path)| path))?;
    // Of all lengths: the shortest get least far.
    let step = inputs.len().div_ceil(STORED.0).max(1);
    let mut bytes = 0;
    let some: Vec<_> = inputs
        .iter()
        .step_by(step)
        .take_while(|(len, _)| {
            bytes += len;
            bytes <= STORED.1
        })
        .map(|(_, path)| path)
        .collect();
    replace(&stored, some.iter().copied())?;
    Ok(format!("{} inputs, {} of them stored", inputs.len(), some.len()))
}

/// Replaces the inputs in a folder by copies of these files. What is there is removed last.
fn replace<'a>(folder: &Path, by: impl Iterator<Item = &'a PathBuf>) -> Result<()> {
    let mut kept = BTreeSet::new();
    for path in by {
        let place = folder.join(path.file_name().context("a file has a name")?);
        std::fs::copy(path, &place)?;
        kept.insert(place);
    }
    for (_, old) in inputs(folder)?.iter().filter(|(_, old)| !kept.contains(old)) {
        std::fs::remove_file(old)?;
    }
    Ok(())
}

/// Length and path of each input in a folder.
fn inputs(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    std::fs::read_dir(folder)?
        .map(|entry| {
            let entry = entry?;
            Ok((entry.metadata()?.len(), entry.path()))
        })
        .collect()
}
