//! Upstream programs that the tests run Husk under, built from Go modules with versions and checksums in
//! `tests/peers/`.

use crate::checkout;
use crate::packages::{self, Tool, tool};
use crate::progress::Progress;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const GO: Tool = tool("go", "golang-go");

/// Programs built from the module `tests/peers/MODULE`, in a folder of that name.
struct Project {
    module: &'static str,
    programs: &'static [&'static str],
    linker: &'static str,
}

/// Sets the version that `kubectl get nodes` shows. Unset, it is not valid.
const KUBERNETES_LINKER: &str = "-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3";

const PROJECTS: [Project; 2] = [
    Project {
        module: "containerd",
        programs: &[
            "github.com/containerd/containerd/v2/cmd/containerd",
            // For pods that are not VMs.
            "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
            "github.com/containerd/containerd/v2/cmd/ctr",
        ],
        linker: "-s -w",
    },
    Project {
        module: "kubernetes",
        programs: &[
            // etcd, whose program is called `server`.
            "go.etcd.io/etcd/server/v3",
            "k8s.io/kubernetes/cmd/kube-apiserver",
            "k8s.io/kubernetes/cmd/kubectl",
            "k8s.io/kubernetes/cmd/kubelet",
        ],
        linker: KUBERNETES_LINKER,
    },
];

/// The programs of a whole cluster that [`PROJECTS`] lacks.
const CONTROL_PLANE: Project = Project {
    module: "kubernetes",
    programs: &[
        "k8s.io/kubernetes/cmd/kube-controller-manager",
        "k8s.io/kubernetes/cmd/kube-proxy",
        "k8s.io/kubernetes/cmd/kube-scheduler",
    ],
    linker: KUBERNETES_LINKER,
};

/// Builds the upstream programs, unless they are in the cache; returns the folder that has a folder of programs for
/// each.
pub fn ensure(progress: &Progress) -> Result<PathBuf> {
    let modules = checkout::root().join("tests/peers");
    let folder = checkout::cache()?.join("peers").join(hash(&modules, &PROJECTS)?);
    for project in &PROJECTS {
        project.ensure(progress, &modules, &folder)?;
    }
    Ok(folder)
}

/// Builds the controller manager, scheduler and proxy of Kubernetes, unless they are in the cache; returns their folder.
pub fn ensure_control_plane(progress: &Progress) -> Result<PathBuf> {
    let modules = checkout::root().join("tests/peers");
    let folder = checkout::cache()?
        .join("peers")
        .join(hash(&modules, &[CONTROL_PLANE])?);
    CONTROL_PLANE.ensure(progress, &modules, &folder)?;
    Ok(folder.join(CONTROL_PLANE.module))
}

impl Project {
    fn ensure(&self, progress: &Progress, modules: &Path, folder: &Path) -> Result<()> {
        let programs = folder.join(self.module);
        checkout::build_once(&programs, |aside| {
            packages::ensure(progress, &[GO])?;
            let mut go = Command::new("go");
            go.args([
                "build",
                "-mod=readonly",
                "-trimpath",
                "-ldflags",
                self.linker,
                "-o",
            ])
            .arg(aside)
            .args(self.programs)
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "")
            .current_dir(modules.join(self.module));
            progress
                .run(format!("building {} from its Go module", self.module), &mut go)
                .context("Go 1.21 or newer is needed, and the Go module proxy")?;
            Ok(())
        })
    }
}

/// Hash of everything that determines the build.
fn hash(modules: &Path, projects: &[Project]) -> Result<String> {
    let mut digest = Sha256::new();
    for project in projects {
        for word in project.programs.iter().chain([&project.linker]) {
            digest.update(word);
        }
        for file in ["go.mod", "go.sum"] {
            let path = modules.join(project.module).join(file);
            digest.update(std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?);
        }
    }
    let mut text = String::new();
    for byte in &digest.finalize()[..8] {
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}
