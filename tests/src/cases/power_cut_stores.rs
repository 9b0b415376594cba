//! Power cuts while objects and volumes change: the stores are consistent afterwards, and what was done is there.

use crate::harness::context::{CommandResult, TestContext};
use crate::harness::log_writes::LoggedDisk;
use crate::harness::program::Session;
use crate::harness::{Case, PATIENCE};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "power-cut-stores",
    about: "dm-log-writes replayed at 100 moments of apply, import, clone, resize and delete: no object or volume is damaged or lost",
    limit: Duration::from_secs(1500),
    run,
};

const DISK_MIB: u64 = 96;
const LOG_MIB: u64 = 512;
/// Power cuts, spread over the writes.
const CUTS: usize = 100;
const WEB: &str = "127.0.0.1:8089";

/// A command, and the names that it adds and removes: of objects as `KIND/NAME`, of claims as `pvc/NAME`.
struct Step {
    words: &'static [&'static str],
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
const STEPS: &[Step] = &[
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
];

/// The names after the first `done` steps.
fn names_after(done: usize) -> BTreeSet<&'static str> {
    let mut names = BTreeSet::new();
    for step in STEPS.iter().take(done) {
        names.extend(step.adds);
        names.retain(|name| !step.removes.contains(name));
    }
    names
}

fn run(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    let web = prepare(ctx)?;
    let mut disk = LoggedDisk::make(ctx, "stores", DISK_MIB, LOG_MIB)?;
    let mounted = ctx.path("mounted");
    disk.mount(&mounted)?;
    disk.mark("begin")?;
    for (number, step) in STEPS.iter().enumerate() {
        husk(ctx, &mounted, step.words)?
            .ok()
            .with_context(|| format!("{:?}", step.words))?;
        disk.mark(&number.to_string())?;
    }
    let log = disk.into_log()?;
    drop(web);
    let begin = log.position("begin")?;
    let ends: Vec<usize> = (0..STEPS.len())
        .map(|step| log.position(&step.to_string()))
        .collect::<Result<_>>()?;
    let last = ends.last().copied().unwrap_or(begin);
    ensure!(last - begin > CUTS, "only {} writes", last - begin);
    let cut = |number: usize| begin + (last - begin) * number / (CUTS - 1);
    ctx.part("power cuts", || {
        for number in 0..CUTS {
            let at = cut(number);
            let done = ends.iter().filter(|end| **end <= at).count();
            std::fs::write(ctx.path("cut.ext4"), log.disk_before(at)?)?;
            check(ctx, done)
                .with_context(|| format!("a power cut after {at} writes, {done} steps were done"))?;
        }
        Ok(())
    });
    Ok(())
}

/// Writes the manifests, and serves a disk.
fn prepare(ctx: &TestContext) -> Result<Session> {
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
    let mut command = Command::new("busybox");
    command
        .args(["httpd", "-f", "-p", WEB, "-h"])
        .arg(ctx.path("web"));
    Session::piped(command, &ctx.log("web.log"))
}

/// A `husk` command whose data is below `folder`.
fn husk(ctx: &TestContext, folder: &Path, words: &[&str]) -> Result<CommandResult> {
    let mut command = ctx.husk(words);
    command.env("HUSK_DATA_DIR", folder.join("data"));
    ctx.finish(command, PATIENCE)
}

/// Mounts the disk as a power cut left it after `done` steps, and checks the stores; then a change is made, after which
/// nothing is left of what was cut off.
fn check(ctx: &TestContext, done: usize) -> Result<()> {
    let folder = ctx.path("cut");
    std::fs::create_dir_all(&folder)?;
    let (file, mount) = (ctx.path("cut.ext4"), folder.to_string_lossy().into_owned());
    host(ctx, &["mount", "-o", "loop", &file.to_string_lossy(), &mount])?;
    let checked = check_mounted(ctx, &folder, done);
    host(ctx, &["umount", &mount])?;
    checked
}

fn check_mounted(ctx: &TestContext, folder: &Path, done: usize) -> Result<()> {
    // The next step may be under way.
    let (before, after) = (names_after(done), names_after(done + 1));
    let found = found(ctx, folder)?;
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

    husk(ctx, folder, &["delete", "vm", "none", "--ignore-not-found"])?.ok()?;
    husk(ctx, folder, &["volume", "create", "after", "--size", "1Mi"])?.ok()?;
    let data = folder.join("data");
    let changes = std::fs::read_dir(data.join("volumes/.changes"))?.count();
    ensure!(changes == 0, "{changes} changes are left");
    let left = list(ctx, &["find", &data.to_string_lossy(), "-name", ".*.new"])?;
    ensure!(left.trim().is_empty(), "{left}");
    Ok(())
}

/// The objects and claims, none of which may be damaged; claims agree with their files.
fn found(ctx: &TestContext, folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for kind in ["secret", "vm", "dv"] {
        let shown = husk(ctx, folder, &["get", kind, "-o", "name"])?.ok()?;
        ensure!(!shown.contains("note: "), "{shown}");
        found.extend(shown.lines().map(|name| format!("{kind}/{name}")));
    }
    let listed = husk(ctx, folder, &["volume", "list", "-o", "json"])?.ok()?;
    let listed: Value = serde_json::from_str(&listed).with_context(|| listed.clone())?;
    for claim in listed.as_array().into_iter().flatten() {
        let name = claim["name"].as_str().context("no name")?;
        let image = folder.join("data/volumes/default").join(name).join("disk.img");
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
        found.push(format!("pvc/{name}"));
    }
    Ok(found)
}

fn list(ctx: &TestContext, words: &[&str]) -> Result<String> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    ctx.finish(command, PATIENCE)?.ok()
}

fn host(ctx: &TestContext, words: &[&str]) -> Result<()> {
    list(ctx, words).map(drop)
}
