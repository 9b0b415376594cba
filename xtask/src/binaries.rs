//! The static binaries for tests with real guests, benchmarks and the demo.
//!
//! They are linked statically: a VMM without shared libraries has a megabyte less resident and starts sooner, and the
//! binaries run on any node. The VMM is built separately from the rest, because cargo would otherwise give it features
//! that only the others need.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::checkout;
use crate::progress::Progress;

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Code of an executable, as opposed to a shared library, calls the functions of other crates directly. By default it
/// looks each of them up in a table that is relocated when the program starts.
const STATIC: &str = "target.x86_64-unknown-linux-gnu.rustflags=\
                      [\"-Ctarget-feature=+crt-static\", \"-Crelocation-model=pie\"]";
/// Packages that are built together, and their binaries.
#[derive(Debug)]
struct Build {
    packages: &'static [&'static str],
    binaries: &'static [&'static str],
}

const VMM: Build = Build {
    packages: &["husk-vmm"],
    binaries: &["husk-vmm"],
};
/// The programs that run VMs, and those of benchmarks: the floor of a boot, and those that measure inside guests.
const RUNTIME: Build = Build {
    packages: &[
        "husk-cli",
        "husk-import",
        "husk-containerd-shim",
        "husk-floor",
        "husk-guest-programs",
    ],
    binaries: &[
        "husk",
        "husk-monitor",
        "husk-import",
        "containerd-shim-husk-v2",
        "husk-answers",
        "husk-floor",
        "husk-flow",
        "husk-netload",
        "husk-uevents",
        "husk-vsock",
    ],
};
/// What only the agent's image, the end-to-end suite and the benchmark of clusters need.
const SUITE: Build = Build {
    packages: &["husk-agent", "husk-agent-testing", "husk-tests"],
    binaries: &["husk-agent", "husk-played-nodes", "husk-e2e"],
};
/// Everything but the VMM.
const OTHERS: &[Build] = &[RUNTIME, SUITE];

/// Profiles of the workspace's Cargo.toml to build with.
#[derive(Debug, Clone, Copy)]
pub enum Profile {
    /// The profile that users run.
    Release,
    /// The profiles of `cargo xtask test`: an optimised VMM, and everything else as the lints and unit tests build it.
    EndToEnd,
}

impl Profile {
    /// Profile of the VMM, which names the folder of the binaries too.
    fn name(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::EndToEnd => "e2e",
        }
    }

    /// Profile of everything but the VMM.
    fn others(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::EndToEnd => "dev",
        }
    }

    /// Folder of the binaries.
    pub fn folder(self) -> PathBuf {
        checkout::target().join(self.name())
    }
}

/// Builds the binaries in [`Profile::folder`] unless they are up to date; returns the CPU time of cargo.
pub fn build(profile: Profile, progress: &Progress) -> Result<Duration> {
    let vmm = build_vmm(profile, progress)?;
    let others = run(OTHERS, profile.others(), progress)?;
    place_others(profile)?;
    Ok(vmm + others)
}

/// Builds the programs for users that run VMs on this machine: the same without the agent and the suite.
pub fn build_runtime(progress: &Progress) -> Result<()> {
    let profile = Profile::Release;
    build_vmm(profile, progress)?;
    run(&[RUNTIME], profile.others(), progress)?;
    RUNTIME.place(profile.others(), profile)
}

/// Builds the VMM; returns the CPU time of cargo.
pub fn build_vmm(profile: Profile, progress: &Progress) -> Result<Duration> {
    let cpu = run(&[VMM], profile.name(), progress)?;
    VMM.place(profile.name(), profile)?;
    Ok(cpu)
}

/// Copies everything but the VMM to [`Profile::folder`].
pub fn place_others(profile: Profile) -> Result<()> {
    OTHERS
        .iter()
        .try_for_each(|build| build.place(profile.others(), profile))
}

/// Arguments of cargo for static binaries. A build without them shares nothing with one that has them.
pub fn static_arguments() -> [&'static str; 5] {
    ["--locked", "--target", TARGET, "--config", STATIC]
}

/// Builds packages together; returns the CPU time of cargo.
fn run(builds: &[Build], cargo_profile: &str, progress: &Progress) -> Result<Duration> {
    let packages = builds.iter().flat_map(|build| build.packages);
    let binaries: Vec<&str> = builds.iter().flat_map(|build| build.binaries).copied().collect();
    let mut cargo = checkout::cargo();
    cargo
        .args(["build", "--profile", cargo_profile])
        .args(static_arguments())
        .args(packages.flat_map(|package| ["--package", package]))
        .current_dir(checkout::root());
    progress.run(format!("building {}", binaries.join(" and ")), &mut cargo)
}

impl Build {
    fn place(&self, cargo_profile: &str, profile: Profile) -> Result<()> {
        // The one profile whose folder has another name.
        let folder = match cargo_profile {
            "dev" => "debug",
            name => name,
        };
        let built = checkout::target().join(TARGET).join(folder);
        let to = checkout::folder(profile.folder())?;
        self.binaries
            .iter()
            .try_for_each(|binary| place(&built.join(binary), &to, binary))
    }
}

/// Installs a fresh binary by a rename, so that a running one keeps its file.
fn place(built: &Path, folder: &Path, name: &str) -> Result<()> {
    let (aside, to) = (folder.join(format!(".{name}.new")), folder.join(name));
    if fs::read(built).ok() == fs::read(&to).ok() {
        return Ok(());
    }
    fs::copy(built, &aside)
        .and_then(|_| fs::rename(&aside, &to))
        .with_context(|| format!("cannot place {}", to.display()))
}
