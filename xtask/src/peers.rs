//! Peers that the tests run Husk under, built from Go modules whose versions and sums are in `tests/peers/`.

use crate::checkout;
use crate::packages::{self, Tool};
use crate::progress::Progress;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const GO: Tool = Tool {
    name: "go",
    package: "golang-go",
};

/// What is built of `tests/peers/containerd`, and goes into a folder of that name.
const CONTAINERD: [&str; 3] = [
    "github.com/containerd/containerd/v2/cmd/containerd",
    // For pods that are no VMs.
    "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
    "github.com/containerd/containerd/v2/cmd/ctr",
];

/// Builds the peers, or finds them in the cache; the folder with a folder of programs for each.
pub fn ensure(progress: &Progress) -> Result<PathBuf> {
    let module = checkout::root().join("tests/peers/containerd");
    let folder = checkout::cache()?.join("peers").join(hash(&module)?);
    let programs = folder.join("containerd");
    if programs.exists() {
        return Ok(folder);
    }
    packages::ensure(progress, &[GO])?;
    let aside = checkout::folder(folder.join(format!("unfinished-{}", std::process::id())))?;
    let mut go = Command::new("go");
    go.args(["build", "-mod=readonly", "-trimpath", "-ldflags=-s -w", "-o"])
        .arg(&aside)
        .args(CONTAINERD)
        .env("CGO_ENABLED", "0")
        .env("GOFLAGS", "")
        .current_dir(&module);
    progress
        .run("building containerd from its Go module", &mut go)
        .context("Go 1.21 or newer is needed, and the Go module proxy")?;
    std::fs::rename(&aside, &programs).with_context(|| format!("cannot place {}", programs.display()))?;
    Ok(folder)
}

/// Of all that says what is built.
fn hash(module: &Path) -> Result<String> {
    let mut digest = Sha256::new();
    for program in CONTAINERD {
        digest.update(program);
    }
    for file in ["go.mod", "go.sum"] {
        let path = module.join(file);
        digest.update(std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?);
    }
    let mut text = String::new();
    for byte in &digest.finalize()[..8] {
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}
