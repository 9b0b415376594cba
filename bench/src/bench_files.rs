//! Files that all runs of a benchmark use, in a separate folder.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use xtask::archive;

/// Programs that `husk run` needs.
pub const HUSK_PROGRAMS: [&str; 3] = ["husk", "husk-monitor", "husk-vmm"];

/// Files that every guest is started with.
#[derive(Debug)]
pub struct BenchFiles {
    /// Folder of these files, and of temporary ones.
    pub folder: PathBuf,
    /// Husk's state, in memory as by default.
    pub runtime: TempDir,
    /// `husk`, with the rest of [`HUSK_PROGRAMS`] beside it.
    pub husk: PathBuf,
    /// The guests' kernel.
    pub kernel: PathBuf,
    /// The guests' initrd.
    pub initrd: PathBuf,
}

/// Creates the folder for a benchmark, which needs the rights to measure.
pub fn folder() -> Result<TempDir> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "measuring needs root, for tracepoints and control groups"
    );
    let folder = tempfile::Builder::new()
        .prefix("husk-bench.")
        .tempdir_in("/var/tmp")?;
    Ok(folder)
}

impl BenchFiles {
    /// Copies the files that all runs read to a plain file system: a shared folder drops its cache at every open.
    pub fn gather(release: &Path, kernel: &Path, initrd: &Path, folder: &Path) -> Result<Self> {
        let copy = |from: &Path, name: &str| -> Result<PathBuf> {
            let to = folder.join(name);
            std::fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
            Ok(to)
        };
        for program in HUSK_PROGRAMS {
            copy(&release.join(program), program)?;
        }
        Ok(Self {
            folder: folder.to_owned(),
            runtime: tempfile::Builder::new()
                .prefix("husk-bench.")
                .tempdir_in("/run")?,
            husk: folder.join("husk"),
            kernel: copy(kernel, "vmlinuz")?,
            initrd: copy(initrd, "initrd")?,
        })
    }

    /// Copies one more file; returns its path.
    pub fn add(&self, file: &Path) -> Result<PathBuf> {
        let to = self.folder.join(file.file_name().context("no file")?);
        std::fs::copy(file, &to).with_context(|| format!("cannot copy {}", file.display()))?;
        Ok(to)
    }

    /// Adds files to the initrd, by name and content.
    pub fn pack(&self, files: &[(&str, &[u8])]) -> Result<()> {
        let path = &self.initrd;
        let mut archive = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        archive::pad(&mut archive);
        archive.extend(archive::newc(files));
        std::fs::write(path, archive).with_context(|| format!("cannot write {}", path.display()))
    }
}
