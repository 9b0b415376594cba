//! The build of the targets.

use crate::checkout;
use crate::packages::{self, Tool, tool};
use crate::progress::Progress;
use crate::test::with_lints;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// libFuzzer is C++.
const TOOLS: [Tool; 1] = [tool("g++", "g++")];
/// The options of cargo-fuzz: counters of edges and a table of them, and comparisons, whose operands libFuzzer tries.
const COVERAGE: [&str; 5] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// Builds `targets`, and returns the folder of their programs. With `sanitizer` they have AddressSanitizer.
pub fn build(targets: &[String], sanitizer: bool, progress: &Progress) -> Result<PathBuf> {
    build_in(checkout::root(), targets, sanitizer, progress)
}

/// The same of another checkout.
pub fn build_in(root: &Path, targets: &[String], sanitizer: bool, progress: &Progress) -> Result<PathBuf> {
    packages::ensure(progress, &TOOLS)?;
    // A copy of the checkout shares what is not Husk's.
    let folder = checkout::target().join(if sanitizer { "fuzz/asan" } else { "fuzz/build" });
    let mut flags = COVERAGE.join(" ");
    let mut cargo = if sanitizer {
        flags.push_str(" -Zsanitizer=address");
        nightly()?
    } else {
        checkout::cargo()
    };
    cargo
        .args(["build", "--release", "--locked", "--target", TARGET])
        .args(targets.iter().flat_map(|target| ["--bin", target]))
        .arg("--manifest-path")
        .arg(root.join("fuzz/Cargo.toml"))
        // With a target, the flags are not those of build scripts.
        .env("RUSTFLAGS", flags)
        .env("CARGO_TARGET_DIR", &folder);
    if !sanitizer && root == checkout::root() {
        with_lints(&mut cargo);
    }
    progress.run(format!("building {} fuzz targets", targets.len()), &mut cargo)?;
    Ok(folder.join(TARGET).join("release"))
}

/// The cargo of a nightly toolchain.
fn nightly() -> Result<Command> {
    let command = || {
        let mut command = Command::new("rustup");
        command
            .args(["run", "nightly", "cargo"])
            // They name the toolchain that runs this program.
            .env_remove("CARGO")
            .env_remove("RUSTC")
            .env_remove("RUSTUP_TOOLCHAIN");
        command
    };
    let found = command()
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !found.is_ok_and(|status| status.success()) {
        bail!("--sanitizer needs a nightly toolchain: rustup toolchain install nightly");
    }
    Ok(command())
}
