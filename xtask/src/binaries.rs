//! The release binaries that everything real is done with.
//!
//! They are linked statically: a VMM without shared libraries has a megabyte less resident and starts
//! sooner, and what is built here runs on any node. The VMM is built apart from the rest, because cargo
//! would otherwise give it the features that only the others need.

use std::fs;
use std::path::Path;
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

/// Builds the release binaries in [`checkout::release`], or finds them up to date; the CPU time of cargo.
pub fn build(progress: &Progress) -> Result<Duration> {
    let mut cpu = Duration::ZERO;
    for (packages, binaries) in BUILDS {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args([
            "build",
            "--release",
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
                &checkout::target().join(TARGET).join("release").join(binary),
                binary,
            )?;
        }
    }
    Ok(cpu)
}

/// Puts a fresh binary where it is looked for, by a rename: one that runs keeps its file.
fn place(built: &Path, name: &str) -> Result<()> {
    let release = checkout::folder(checkout::release())?;
    let (aside, to) = (release.join(format!(".{name}.new")), release.join(name));
    if fs::read(built).ok() == fs::read(&to).ok() {
        return Ok(());
    }
    fs::copy(built, &aside)
        .and_then(|_| fs::rename(&aside, &to))
        .with_context(|| format!("cannot place {}", to.display()))
}
