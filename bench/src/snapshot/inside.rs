//! The process that runs where KVM is: saves and restores guests, one at a time, then restores many clones of one.

use super::case::{self, Case, MEMORY_MIB, MORE_MIB, Running, WRITTEN_MIB};
use super::clones;
use crate::bench_files::{self, BenchFiles, Sources};
use crate::cases::BenchCase;
use crate::guest::{FIRST_LINE, SCRIPT};
use crate::rounds::{Attempts, Turn, turns};
use crate::started::{Started, milliseconds};
use crate::{host, message};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Files of all guests, with `husk-answers`.
    pub sources: Sources,
    /// Cases to compare.
    pub cases: Vec<Case>,
    /// Rounds, each with every case.
    pub rounds: u32,
    /// Clones of one guest; none if 0.
    pub clones: u32,
    /// Do everything once as a warm-up.
    pub thorough: bool,
}

/// Program that answers in the guest.
pub const ANSWERS: &str = "husk-answers";
/// The guest has written to its memory.
const READY: &str = "ready;";
/// Time limit of everything that is done with one guest.
const TIMEOUT: Duration = Duration::from_secs(180);
/// Time after which a booted guest is idle.
const REST: Duration = Duration::from_secs(1);
/// Number of runs that may fail.
const SPARE: u32 = 3;

/// Runs the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = bench_files::folder()?;
    let files = BenchFiles::gather(&plan.sources, folder.path())?;
    let sizes = format!("{WRITTEN_MIB} {MORE_MIB}\n");
    files.pack_program(
        ANSWERS,
        &[
            ("script", include_bytes!("guest.sh")),
            ("sizes", sizes.as_bytes()),
        ],
    )?;
    let facts = [
        ("vcpus", json!(1)),
        ("memory_mib", json!(MEMORY_MIB)),
        ("written_mib", json!(WRITTEN_MIB)),
        ("clone_written_mib", json!(MORE_MIB)),
        ("clones", json!(plan.clones)),
        ("command_line", json!(SCRIPT)),
    ];
    message::env(host::facts(&files.husk)?, facts);
    let mut cases = plan.cases.clone();
    if cases.contains(&Case::Q35Mapped) && !case::has_capability(&files, "mapped-ram")? {
        cases.retain(|case| *case != Case::Q35Mapped);
        message::more((Case::Q35Mapped, "this QEMU has no mapped-ram: it needs 9.0"));
    }
    ensure!(!cases.is_empty(), "none of the cases can be measured here");
    let bench = Bench { files };
    let attempts = Attempts::new(SPARE);
    if plan.thorough {
        attempts.warm_up(&cases, |case| bench.round(case, None))?;
    }
    for Turn { case, round, what } in turns(&cases, plan.rounds) {
        attempts.run(case.name(), &what, || bench.round(case, Some(round)))?;
        if case != Case::Q35Mapped {
            attempts.run(case.name(), &what, || bench.first_line(case, round))?;
        }
    }
    if plan.clones > 0 && cases.contains(&Case::Husk) {
        attempts.run(Case::Husk.name(), "clones", || bench.clones(plan.clones))?;
    }
    Ok(())
}

struct Bench {
    files: BenchFiles,
}

impl Bench {
    /// Saves a guest and restores it. The values are reported at the end, all or none.
    fn round(&self, case: Case, run: Option<u32>) -> Result<()> {
        let saved = Saved::new(&self.files)?;
        let [save, synced] = self.save(case, &saved.path)?;
        let mut restored = case.restore(&self.files, &saved.path, TIMEOUT)?;
        let answered = restored.line.answered(restored.started.deadline())?;
        let restore = answered - restored.started.began;
        if case == Case::Husk {
            restored.started.returned()?;
        }
        let Some(run) = run else {
            return Ok(());
        };
        let mut values = vec![
            ("save_ms", "ms", milliseconds(save)),
            ("save_synced_ms", "ms", milliseconds(synced)),
            ("restore_ms", "ms", milliseconds(restore)),
            ("saved_mib", "MiB", saved.allocated_mib()?),
        ];
        if case == Case::Husk {
            let pause = self.live_pause(&mut restored)?;
            values.push(("live_pause_ms", "ms", milliseconds(pause)));
        }
        message::values("snapshot", case.name(), run, values);
        Ok(())
    }

    /// Saves a guest while it runs. Returns the longest time for which it did not answer.
    fn live_pause(&self, running: &mut Running) -> Result<Duration> {
        let saved = Saved {
            path: self.files.folder.join("saved-live"),
        };
        let mut husk = case::save_live(&self.files, &saved.path)?;
        let deadline = running.started.deadline();
        let (mut last, mut longest) = (running.line.answered(deadline)?, Duration::ZERO);
        let status = loop {
            let answered = running.line.answered(deadline)?;
            longest = longest.max(answered - last);
            last = answered;
            if let Some(status) = husk.try_wait()? {
                break status;
            }
        };
        ensure!(status.success(), "husk snapshot --live: {status}");
        Ok(longest)
    }

    /// Boots a guest, saves it to `to` and ends it. Returns the time that it took to save, without and with the time
    /// until all is on the disk.
    fn save(&self, case: Case, to: &Path) -> Result<[Duration; 2]> {
        let mut running = case.boot(&self.files, TIMEOUT)?;
        running.line.until(READY, running.started.deadline())?;
        running.line.answered(running.started.deadline())?;
        std::thread::sleep(REST);
        // What others have written is not to be written meanwhile.
        rustix::fs::sync();
        let began = Instant::now();
        let took = case.save(&mut running, &self.files, to)?;
        for file in files_of(to)? {
            File::open(&file)?.sync_all()?;
        }
        Ok([took, began.elapsed()])
    }

    /// Times a boot with the kernel's earliest console, up to its first line.
    fn first_line(&self, case: Case, run: u32) -> Result<()> {
        let mut started = Started::start(case.early(&self.files)?, TIMEOUT)?;
        let first = started.until(FIRST_LINE)? - started.began;
        let values = [("pre_kernel_ms", "ms", milliseconds(first))];
        message::values("snapshot", case.name(), run, values);
        Ok(())
    }

    /// Restores many clones of one guest, which all run, and measures their memory.
    fn clones(&self, count: u32) -> Result<()> {
        let saved = Saved::new(&self.files)?;
        self.save(Case::Husk, &saved.path)?;
        let mut clones = Vec::new();
        for number in 1..=count {
            message::news(format!("husk: clone {number} of {count}"));
            let clone = self.restored_clone(&format!("bench-clone-{number}"), &saved.path);
            clones.push(clone.with_context(|| format!("clone {number}"))?);
        }
        clones::report(&clones, &saved.path)
    }

    fn restored_clone(&self, name: &str, from: &Path) -> Result<Running> {
        let mut clone = case::restore_as(name, &self.files, from, TIMEOUT)?;
        let deadline = clone.started.deadline();
        clone.line.answered(deadline)?;
        clone.started.returned()?;
        clone.line.touched(deadline)?;
        Ok(clone)
    }
}

/// The place of a saved guest, which is removed when this is dropped.
struct Saved {
    path: PathBuf,
}

impl Saved {
    fn new(files: &BenchFiles) -> Result<Self> {
        let path = files.folder.join("saved");
        ensure!(!path.exists(), "{} exists", path.display());
        Ok(Self { path })
    }

    /// Space that it takes on the disk.
    fn allocated_mib(&self) -> Result<f64> {
        let blocks = files_of(&self.path)?
            .into_iter()
            .map(|file| Ok(file.metadata()?.blocks()));
        Ok(blocks.sum::<Result<u64>>()? as f64 * 512.0 / f64::from(1 << 20))
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        let _ = match self.path.is_dir() {
            true => std::fs::remove_dir_all(&self.path),
            false => std::fs::remove_file(&self.path),
        };
    }
}

/// The files of a saved guest: one file, or those of a directory.
fn files_of(saved: &Path) -> Result<Vec<PathBuf>> {
    if !saved.is_dir() {
        return Ok(vec![saved.to_owned()]);
    }
    let entries = saved.read_dir()?;
    Ok(entries
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_guest_is_a_file_or_a_directory() {
        let folder = tempfile::tempdir().expect("a folder");
        let saved = Saved {
            path: folder.path().join("saved"),
        };
        std::fs::write(&saved.path, vec![1; 1 << 20]).expect("written");
        assert_eq!(
            files_of(&saved.path).expect("a file"),
            std::slice::from_ref(&saved.path)
        );
        assert!(saved.allocated_mib().expect("a size") >= 1.0);
        let path = saved.path.clone();
        drop(saved);
        assert!(!path.exists());
        std::fs::create_dir(&path).expect("made");
        std::fs::write(path.join("memory"), "").expect("written");
        assert_eq!(files_of(&path).expect("files"), [path.join("memory")]);
        drop(Saved { path: path.clone() });
        assert!(!path.exists());
    }
}
