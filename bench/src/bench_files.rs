//! Files that all runs of a benchmark use, in a separate folder.

use crate::peers::Peers;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use xtask::{archive, checkout, images};

/// Programs that `husk run` needs.
const HUSK_PROGRAMS: [&str; 3] = ["husk", "husk-monitor", "husk-vmm"];

/// Origins of the files that every guest is started with.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sources {
    /// Folder of Husk's programs.
    pub release: PathBuf,
    /// Names of other programs in it that the benchmark needs.
    pub programs: Vec<String>,
    /// Kernel of all guests.
    pub kernel: PathBuf,
    /// Initrd of all guests.
    pub initrd: PathBuf,
    /// Files that only this benchmark needs.
    pub others: Vec<PathBuf>,
    /// Other VMMs.
    pub peers: Peers,
}

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
    /// Other VMMs.
    pub peers: Peers,
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

impl Sources {
    /// The initrd and the file `kernel` of an image, with Husk's programs and others.
    pub fn new(image: &str, kernel: &str, programs: &[&str]) -> Result<Self> {
        let image = images::path(image)?;
        Ok(Self {
            release: checkout::release(),
            programs: programs.iter().map(|program| (*program).to_owned()).collect(),
            kernel: image.join(kernel),
            initrd: image.join("initrd"),
            others: Vec::new(),
            peers: Peers::default(),
        })
    }

    /// All files.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        let other = self.programs.iter().map(String::as_str);
        let programs = HUSK_PROGRAMS.into_iter().chain(other);
        let programs = programs.map(move |program| self.release.join(program));
        let guest = [self.kernel.clone(), self.initrd.clone()];
        let others = self.others.iter().cloned();
        programs.chain(guest).chain(others).chain(self.peers.programs())
    }

    /// The same files in a folder that has all of them.
    pub fn within(&self, folder: &Path) -> Self {
        Self {
            release: folder.to_owned(),
            programs: self.programs.clone(),
            kernel: moved(&self.kernel, folder),
            initrd: moved(&self.initrd, folder),
            others: self.others.iter().map(|file| moved(file, folder)).collect(),
            peers: self.peers.map(|program| moved(program, folder)),
        }
    }
}

/// Writes a file for the guests.
pub fn keep(name: &str, content: &[u8]) -> Result<PathBuf> {
    let file = checkout::folder(checkout::target().join("bench"))?.join(name);
    std::fs::write(&file, content).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

/// Path of a file of the same name in another folder.
pub fn moved(file: &Path, folder: &Path) -> PathBuf {
    folder.join(file.file_name().unwrap_or_default())
}

fn runtime() -> Result<TempDir> {
    Ok(tempfile::Builder::new()
        .prefix("husk-bench.")
        .tempdir_in("/run")?)
}

impl BenchFiles {
    /// Copies the files that all runs read to a plain file system: a shared folder drops its cache at every open.
    pub fn gather(sources: &Sources, folder: &Path) -> Result<Self> {
        for file in sources.files() {
            std::fs::copy(&file, moved(&file, folder))
                .with_context(|| format!("cannot copy {}", file.display()))?;
        }
        let Sources {
            kernel,
            initrd,
            peers,
            ..
        } = sources.within(folder);
        Ok(Self {
            folder: folder.to_owned(),
            runtime: runtime()?,
            husk: folder.join("husk"),
            kernel,
            initrd,
            peers,
        })
    }

    /// The same files with another kernel of the folder.
    pub fn with_kernel(&self, name: &str) -> Result<Self> {
        Ok(Self {
            folder: self.folder.clone(),
            runtime: runtime()?,
            husk: self.husk.clone(),
            kernel: self.folder.join(name),
            initrd: self.initrd.clone(),
            peers: self.peers.clone(),
        })
    }

    /// Adds files to the initrd, by name and content.
    pub fn pack(&self, files: &[(&str, &[u8])]) -> Result<()> {
        let path = &self.initrd;
        let mut archive = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        archive::pad(&mut archive);
        archive.extend(archive::newc(files));
        std::fs::write(path, archive).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Adds a program of the folder to the initrd, with the guest's script and other files.
    pub fn pack_program(&self, name: &str, files: &[(&str, &[u8])]) -> Result<()> {
        let program = self.folder.join(name);
        let program =
            std::fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
        self.pack(&[files, &[(name, &program[..])]].concat())
    }

    /// Files of a test, of which only the folder has to exist.
    #[cfg(test)]
    pub fn example(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            runtime: tempfile::tempdir().expect("a folder"),
            husk: "/files/husk".into(),
            kernel: "/files/vmlinuz".into(),
            initrd: "/files/initrd".into(),
            peers: Peers::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_guests_scripts_are_shell() {
        for script in [
            include_str!("disk/guest.sh"),
            include_str!("disk/mark.sh"),
            include_str!("hotplug/guest.sh"),
            include_str!("net/guest.sh"),
            include_str!("snapshot/guest.sh"),
        ] {
            let status = std::process::Command::new("sh")
                .args(["-n", "-c", script])
                .status()
                .expect("sh");
            assert!(status.success(), "{script}");
        }
    }
}
