//! The static binaries for tests with real guests, benchmarks and the demo.
//!
//! They are linked statically: a VMM without shared libraries has a megabyte less resident and starts sooner, and the
//! binaries run on any node. The VMM is built apart from the rest, because cargo would otherwise give it features that
//! only the others need.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::checkout;
use crate::progress::Progress;

const TARGET: &str = "x86_64-unknown-linux-gnu";
const STATIC: &str = "target.x86_64-unknown-linux-gnu.rustflags=[\"-Ctarget-feature=+crt-static\"]";
/// Packages that are built together, and their binaries.
const BUILDS: [(&[&str], &[&str]); 2] = [
    (&["husk-vmm"], &["husk-vmm"]),
    (
        &["husk-cli", "husk-containerd-shim", "husk-tests"],
        &[
            "husk",
            "containerd-shim-husk-v2",
            "husk-e2e",
            "husk-flow",
            "husk-netload",
            "husk-uevents",
        ],
    ),
];

/// A profile of the workspace's Cargo.toml to build with.
#[derive(Debug, Clone, Copy)]
pub enum Profile {
    /// The profile that users run.
    Release,
    /// The same without link-time optimisation, for the tests.
    EndToEnd,
}

impl Profile {
    fn name(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::EndToEnd => "e2e",
        }
    }

    /// Folder of the binaries.
    pub fn folder(self) -> PathBuf {
        checkout::target().join(self.name())
    }
}

/// Builds the binaries in [`Profile::folder`] unless they are up to date; returns the CPU time of cargo.
pub fn build(profile: Profile, progress: &Progress) -> Result<Duration> {
    let mut cpu = Duration::ZERO;
    for (packages, binaries) in BUILDS {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args([
            "build",
            "--profile",
            profile.name(),
            "--locked",
            "--target",
            TARGET,
            "--config",
            STATIC,
        ]);
        cargo
            .args(packages.iter().flat_map(|package| ["--package", package]))
            .current_dir(checkout::root());
        cpu += progress.run(format!("building {}", binaries.join(" and ")), &mut cargo)?;
        for binary in binaries {
            place(
                &checkout::target().join(TARGET).join(profile.name()).join(binary),
                &checkout::folder(profile.folder())?,
                binary,
            )?;
        }
    }
    Ok(cpu)
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
