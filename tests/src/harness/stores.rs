//! Commands that change the stores of objects and claims, and what a power cut may leave of them.

use super::context::{CommandResult, TestContext};
use super::program::Session;
use super::registry::serve_web;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const WEB: &str = "127.0.0.1:8089";
/// Beginning of the names of objects that the steps do not change.
pub const KEPT: &str = "kept-";
/// Name of a VM whose file a case has broken.
pub const BROKEN: &str = "kept-broken";

/// A command, and the names that it adds and removes: of objects as `KIND/NAME`, of claims as `pvc/NAME`.
#[derive(Debug)]
pub struct Step {
    pub words: &'static [&'static str],
    adds: &'static [&'static str],
    removes: &'static [&'static str],
}

const fn step(words: &'static [&'static str], adds: &'static [&'static str]) -> Step {
    let removes = &[];
    Step { words, adds, removes }
}

const fn removal(words: &'static [&'static str], removes: &'static [&'static str]) -> Step {
    let adds = &[];
    Step { words, adds, removes }
}

/// The commands, one after the other.
pub const STEPS: &[Step] = &[
    step(&["volume", "create", "data", "--size", "4Mi"], &["pvc/data"]),
    step(
        &["apply", "-f", "vm.yaml"],
        &["secret/key", "vm/halted", "dv/halted-blank", "pvc/halted-blank"],
    ),
    step(&["volume", "clone", "data", "copy"], &["pvc/copy"]),
    step(&["apply", "-f", "dv.yaml"], &["dv/web", "pvc/web"]),
    step(&["volume", "resize", "data", "8Mi"], &[]),
    step(&["apply", "-f", "changed.yaml"], &[]),
    removal(
        &["delete", "vm", "halted"],
        &["vm/halted", "dv/halted-blank", "pvc/halted-blank"],
    ),
    removal(&["delete", "dv", "web"], &["dv/web", "pvc/web"]),
    removal(&["volume", "rm", "copy"], &["pvc/copy"]),
    removal(&["delete", "secret", "key"], &["secret/key"]),
    removal(&["volume", "rm", "data"], &["pvc/data"]),
];

/// The names after the first `done` steps.
pub fn names_after(done: usize) -> BTreeSet<&'static str> {
    let mut names = BTreeSet::new();
    for step in STEPS.iter().take(done) {
        names.extend(step.adds);
        names.retain(|name| !step.removes.contains(name));
    }
    names
}

/// Writes the manifests of the steps to the case's folder, and serves a disk.
pub fn prepare(ctx: &TestContext) -> Result<Session> {
    let vm = |cores: u32| {
        json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachine",
            "metadata": {"name": "halted"},
            "spec": {
                "runStrategy": "Halted",
                "template": {"spec": {
                    "domain": {
                        "cpu": {"cores": cores},
                        "memory": {"guest": "128Mi"},
                        "devices": {"disks": [{"name": "blank", "disk": {}}]},
                    },
                    "volumes": [{"name": "blank", "dataVolume": {"name": "halted-blank"}}],
                }},
                "dataVolumeTemplates": [{
                    "metadata": {"name": "halted-blank"},
                    "spec": {"source": {"blank": {}}, "storage": {"resources": {"requests": {"storage": "4Mi"}}}},
                }],
            },
        })
    };
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}, "stringData": {"password": "secret"},
    });
    let web = json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1",
        "kind": "DataVolume",
        "metadata": {"name": "web"},
        "spec": {
            "source": {"http": {"url": format!("http://{WEB}/disk.img")}},
            "storage": {"resources": {"requests": {"storage": "8Mi"}}},
        },
    });
    std::fs::write(ctx.path("vm.yaml"), format!("{secret}\n---\n{}\n", vm(1)))?;
    std::fs::write(ctx.path("changed.yaml"), vm(2).to_string())?;
    std::fs::write(ctx.path("dv.yaml"), web.to_string())?;
    std::fs::create_dir(ctx.path("web"))?;
    std::fs::write(ctx.path("web/disk.img"), vec![b'w'; 6 << 20])?;
    serve_web(ctx, WEB)
}

/// The stores below one data directory.
#[allow(missing_debug_implementations)]
pub struct Stores<'s> {
    /// Runs a `husk` command with this data directory.
    pub husk: &'s dyn Fn(&[&str]) -> Result<CommandResult>,
    pub data: PathBuf,
}

impl Stores<'_> {
    /// Checks the stores after the power was cut with `done` steps done; then a change is made, after which nothing is
    /// left of what was cut off.
    pub fn check(&self, done: usize) -> Result<()> {
        // The next step may be under way.
        let (before, after) = (names_after(done), names_after(done + 1));
        let found = self.found()?;
        let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
        let lost: Vec<_> = before
            .intersection(&after)
            .filter(|name| !found.contains(*name))
            .collect();
        ensure!(lost.is_empty(), "lost: {lost:?}; there are {found:?}");
        let more: Vec<_> = found
            .iter()
            .filter(|name| !before.contains(**name) && !after.contains(**name))
            .collect();
        ensure!(more.is_empty(), "unexpected: {more:?}");

        self.husk(&["delete", "vm", "none", "--ignore-not-found"])?;
        self.husk(&["volume", "create", "after", "--size", "1Mi"])?;
        self.husk(&["volume", "rm", "after"])?;
        let changes = std::fs::read_dir(self.data.join("volumes/.changes"))?.count();
        ensure!(changes == 0, "{changes} changes are left");
        let unfinished = unfinished_files(&self.data)?;
        ensure!(unfinished.is_empty(), "{unfinished:?}");
        Ok(())
    }

    /// Deletes what the steps add, and checks that nothing of it is left.
    pub fn clear(&self) -> Result<()> {
        for kind in ["vm", "dv", "secret"] {
            for name in self.found()? {
                if let Some((_, name)) = name.split_once('/').filter(|found| found.0 == kind) {
                    self.husk(&["delete", kind, name, "--ignore-not-found"])?;
                }
            }
        }
        for name in self.found()? {
            let name = name.strip_prefix("pvc/").unwrap_or(&name);
            self.husk(&["volume", "rm", name])?;
        }
        let left = self.found()?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    }

    /// The objects and claims, none of which may be damaged, but those called [`KEPT`]. Claims agree with their files.
    fn found(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for kind in ["secret", "vm", "dv"] {
            let shown = self.husk(&["get", kind, "-o", "name"])?;
            let names = shown.lines().filter(|name| !name.starts_with(KEPT));
            found.extend(names.map(|name| format!("{kind}/{name}")));
        }
        let listed = self.husk(&["volume", "list", "-o", "json"])?;
        let listed: Value = serde_json::from_str(&listed).with_context(|| listed.clone())?;
        for claim in listed.as_array().into_iter().flatten() {
            let name = claim["name"].as_str().context("no name")?;
            let image = self.data.join("volumes/default").join(name).join("disk.img");
            let size = std::fs::metadata(&image)?.len();
            ensure!(
                claim["sizeBytes"] == size && size >= 4 << 20,
                "{name}: {size}, {claim}"
            );
            if name == "web" {
                let content = std::fs::read(&image)?;
                ensure!(
                    content[..6 << 20].iter().all(|byte| *byte == b'w'),
                    "the imported data is not there"
                );
            }
            if !name.starts_with(KEPT) {
                found.push(format!("pvc/{name}"));
            }
        }
        Ok(found)
    }

    fn husk(&self, words: &[&str]) -> Result<String> {
        let text = (self.husk)(words)?.ok()?;
        if words[0] != "get" {
            return Ok(text);
        }
        // A warning names a file that cannot be read.
        let (warnings, lines): (Vec<_>, Vec<_>) =
            text.lines().partition(|line| line.starts_with("warning: "));
        ensure!(warnings.iter().all(|line| line.contains(BROKEN)), "{warnings:?}");
        Ok(lines.join("\n"))
    }
}

/// Files below `folder` that were being written.
fn unfinished_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') && name.ends_with(".new") {
            found.push(entry.path());
        }
        if entry.file_type()?.is_dir() {
            found.extend(unfinished_files(&entry.path())?);
        }
    }
    Ok(found)
}
