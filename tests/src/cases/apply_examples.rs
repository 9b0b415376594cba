//! Every file of KubeVirt's `examples/` by `husk apply`: what `tests/kubevirt/apply.toml` says becomes of it.

use crate::harness::Case;
use crate::harness::applied::{husk, removed, trust, until_status};
use crate::harness::context::TestContext;
use crate::harness::examples::{self, Example, Images, Verdict};
use crate::harness::guest::Shell;
use crate::harness::registry::{self, BOOT, KERNEL, sh};
use crate::harness::vm::console;
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "apply-examples",
    about: "husk apply of each file of KubeVirt's examples/: it runs, or is refused with the text in tests/kubevirt/apply.toml",
    limit: Duration::from_secs(2400),
    run,
};

const VERDICTS: &str = include_str!("../../kubevirt/apply.toml");
const IMAGES: Images = Images {
    disk: BOOT,
    kernel: KERNEL,
};
/// Claims that the examples name.
const CLAIMS: [&str; 2] = ["disk-alpine", "disk-custom"];

fn run(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    let folder = std::env::var_os("HUSK_EXAMPLES").context("HUSK_EXAMPLES is not set")?;
    let examples = examples::read(ctx, &PathBuf::from(folder), VERDICTS, &IMAGES)?;
    let registry = registry::start(ctx)?;
    registry::fill(ctx)?;
    registry::push_boot_disk(ctx)?;
    trust(ctx)?;
    for claim in CLAIMS {
        husk(ctx, &["volume", "create", claim, "--size", "64Mi"])?.ok()?;
        let path = husk(ctx, &["volume", "path", claim])?.ok()?;
        sh(ctx, &format!("cp boot-image/disk/disk.img {}", path.trim()))?;
    }
    let (stored, others): (Vec<_>, Vec<_>) = examples
        .iter()
        .partition(|example| matches!(example.verdict, Verdict::Applies));
    for example in &stored {
        ctx.part(&example.file, || apply(ctx, example, 0).map(drop));
    }
    for example in &others {
        ctx.part(&example.file, || {
            let done = match &example.verdict {
                Verdict::Refused(reason) => refused(ctx, example, reason),
                _ => runs(ctx, example),
            };
            // It fails for files that have nothing to delete.
            let _ = husk(ctx, &["delete", "-f", &example.file, "--ignore-not-found"])?;
            done?;
            ctx.nothing_left(Duration::from_secs(10))
        });
    }
    for example in &stored {
        husk(ctx, &["delete", "-f", &example.file])?.ok()?;
    }
    for claim in CLAIMS {
        husk(ctx, &["volume", "rm", claim])?.ok()?;
    }
    drop(registry);
    removed(ctx)
}

/// Applies the file, whose exit status is to be `status`; returns what was said.
fn apply(ctx: &TestContext, example: &Example, status: i32) -> Result<String> {
    let applied = husk(ctx, &["apply", "-f", &example.file])?;
    match status {
        0 => applied.ok(),
        status => applied.fails(status),
    }
}

/// The VM runs, and its guest gives a shell.
fn runs(ctx: &TestContext, example: &Example) -> Result<()> {
    let name = &example.name;
    apply(ctx, example, 0)?;
    if example.kind == "VirtualMachine" {
        husk(ctx, &["start", name])?.ok()?;
        until_status(ctx, name, "Running")?;
    }
    let console = console(ctx, name)?;
    console.send("\n")?;
    Shell::small_on(&console)?.expect_contains("uname -s", &["Linux"])
}

/// `husk apply` says the text, or the `husk start` of a VM that is halted, and nothing runs.
fn refused(ctx: &TestContext, example: &Example, reason: &str) -> Result<()> {
    let applied = husk(ctx, &["apply", "-f", &example.file])?;
    let mut said = applied.text.clone();
    if applied.status == 0 && example.kind == "VirtualMachine" {
        let started = husk(ctx, &["start", &example.name])?;
        ensure!(started.status != 0, "it starts");
        said = started.text;
    } else {
        ensure!(applied.status != 0, "it is applied: {said}");
    }
    ensure!(said.contains(reason), "another answer: {said}");
    ensure!(ctx.list()?.is_empty(), "it runs");
    Ok(())
}
