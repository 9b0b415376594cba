//! Upstream programs that the tests run Husk under, built from Go modules with versions and checksums in
//! `tests/peers/`.

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

/// Programs built from the module `tests/peers/NAME`, in a folder of that name.
struct Project {
    name: &'static str,
    programs: &'static [&'static str],
    linker: &'static str,
}

const PROJECTS: [Project; 2] = [
    Project {
        name: "containerd",
        programs: &[
            "github.com/containerd/containerd/v2/cmd/containerd",
            // For pods that are not VMs.
            "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
            "github.com/containerd/containerd/v2/cmd/ctr",
        ],
        linker: "-s -w",
    },
    Project {
        name: "kubernetes",
        programs: &[
            // etcd, whose program is called `server`.
            "go.etcd.io/etcd/server/v3",
            "k8s.io/kubernetes/cmd/kube-apiserver",
            "k8s.io/kubernetes/cmd/kubectl",
            "k8s.io/kubernetes/cmd/kubelet",
        ],
        // `kubectl get nodes` shows it; unset, it is no valid version.
        linker: "-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3",
    },
];

/// Builds the upstream programs, unless they are in the cache; returns the folder that has a folder of programs for
/// each.
pub fn ensure(progress: &Progress) -> Result<PathBuf> {
    let modules = checkout::root().join("tests/peers");
    let folder = checkout::cache()?.join("peers").join(hash(&modules)?);
    for project in &PROJECTS {
        project.ensure(progress, &modules, &folder)?;
    }
    Ok(folder)
}

impl Project {
    fn ensure(&self, progress: &Progress, modules: &Path, folder: &Path) -> Result<()> {
        let programs = folder.join(self.name);
        if programs.exists() {
            return Ok(());
        }
        packages::ensure(progress, &[GO])?;
        let aside = checkout::folder(folder.join(format!("unfinished-{}", std::process::id())))?;
        let mut go = Command::new("go");
        go.args([
            "build",
            "-mod=readonly",
            "-trimpath",
            "-ldflags",
            self.linker,
            "-o",
        ])
        .arg(&aside)
        .args(self.programs)
        .env("CGO_ENABLED", "0")
        .env("GOFLAGS", "")
        .current_dir(modules.join(self.name));
        progress
            .run(format!("building {} from its Go module", self.name), &mut go)
            .context("Go 1.21 or newer is needed, and the Go module proxy")?;
        std::fs::rename(&aside, &programs).with_context(|| format!("cannot place {}", programs.display()))
    }
}

/// Hash of everything that determines the build.
fn hash(modules: &Path) -> Result<String> {
    let mut digest = Sha256::new();
    for project in &PROJECTS {
        for word in project.programs.iter().chain([&project.linker]) {
            digest.update(word);
        }
        for file in ["go.mod", "go.sum"] {
            let path = modules.join(project.name).join(file);
            digest.update(std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?);
        }
    }
    let mut text = String::new();
    for byte in &digest.finalize()[..8] {
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}
