//! A VM that follows its manifest while it runs.

use crate::cases::hotplug::{comes, goes, image, shell};
use crate::harness::context::{CommandResult, TestContext};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, images};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "sync",
    about: "husk sync: a hotpluggable volume comes, grows and goes with its manifest's entry; discs; pause, resume and restore",
    limit: Duration::from_secs(480),
    run,
};

const MIB: u64 = 1 << 20;
/// Time limit of a snapshot in a busy lab.
const SAVE: Duration = Duration::from_secs(240);

/// Runs `husk sync` with this manifest.
fn sync(ctx: &TestContext, manifest: &Manifest, more: &[OsString]) -> Result<CommandResult> {
    let words = manifest.run_words(ctx)?;
    let file = words.get(1).context("the manifest has a file")?;
    let mut command = ctx.husk(&["sync", manifest.name(), "-f"]);
    command.arg(file).args(more);
    ctx.finish(command, TIMEOUT)
}

fn at(name: &str, path: &Path) -> [OsString; 2] {
    let mut word = OsString::from(format!("{name}="));
    word.push(path);
    ["--volume".into(), word]
}

fn run(ctx: &TestContext) -> Result<()> {
    let plain = Manifest::new("synced")
        .drive("cd")
        .small(&images::small("6.12")?, "scsi,shell");
    let source = json!({"dataVolume": {"name": "data", "hotpluggable": true}});
    let wanted = plain
        .clone()
        .device("data", json!({"disk": {"bus": "scsi"}}), source);
    let vm = Vm::start(ctx, &plain)?;
    vm.expect("husk-scsi: end\n")?;
    let shell = shell(&vm)?;
    let path = image(ctx, "data", 16)?;

    sync(ctx, &plain, &[])?.says(&["nothing to change"])?;
    // The options do not give the path of the volume.
    sync(ctx, &wanted, &[])?.fails_with(1, &["volume data", "pending"])?;
    sync(ctx, &wanted, &at("data", &path))?.says(&["added volume data"])?;
    let disk = comes(&shell, "data")?;
    has(&shell, &disk, 16)?;
    sync(ctx, &wanted, &[])?.says(&["nothing to change"])?;

    File::options().write(true).open(&path)?.set_len(40 * MIB)?;
    // The monitor may have noticed the change already; the guest must see it in either case.
    sync(ctx, &wanted, &[])?.ok()?;
    has(&shell, &disk, 40)?;
    let last = 40 * MIB / 512 - 1;
    shell.ok(&format!(
        "printf 'the end' | dd of=/dev/{disk} bs=512 seek={last} conv=notrunc,fsync status=none"
    ))?;

    ctx.part("refused", || {
        let other = wanted.clone().memory("512Mi").cpu(1, 2, 1);
        sync(ctx, &other, &[])?
            .fails_with(2, &["spec.domain.resources.requests.memory", "spec.domain.cpu"])?;
        has(&shell, &disk, 40)
    });
    ctx.part("paused", || {
        let state = |state: &str| ["--state", state].map(OsString::from);
        sync(ctx, &wanted, &state("paused"))?.says(&["paused"])?;
        vm.until("it stands still", TIMEOUT, |vm| vm["paused"] == true)?;
        sync(ctx, &wanted, &state("running"))?.says(&["resumed"])?;
        shell.ok("echo the guest goes on").map(drop)
    });

    ctx.part("discs", || discs(ctx, &wanted, &shell));

    let saved = ctx.path("saved");
    let mut snapshot = ctx.husk(&["snapshot", "synced"]);
    snapshot.arg(&saved);
    ctx.finish(snapshot, SAVE)?.ok()?;
    vm.discard()?;
    let vm = Vm::restore(ctx, &saved, "synced")?;
    let shell = Shell::going_on(vm.console())?;
    sync(ctx, &wanted, &[])?.says(&["nothing to change"])?;
    has(&shell, &disk, 40)?;
    sync(ctx, &plain, &[])?.says(&["removed volume data"])?;
    goes(&shell, "data")?;
    let bytes = std::fs::read(&path)?;
    ensure!(
        bytes.len() as u64 == 40 * MIB && bytes[bytes.len() - 512..].starts_with(b"the end"),
        "what was written is lost"
    );
    vm.power_off(&shell)
}

/// Discs come and go in the drive of the VM.
fn discs(ctx: &TestContext, empty: &Manifest, shell: &Shell<'_>) -> Result<()> {
    let with = |name: &str| {
        let source = json!({"dataVolume": {"name": name, "hotpluggable": true}});
        empty.clone().source("cd", source)
    };
    let disc = |name: &str| {
        let path = image(ctx, name, 4)?;
        let file = File::options().write(true).open(&path)?;
        file.write_all_at(format!("this is the {name} disc").as_bytes(), 0)?;
        anyhow::Ok(path)
    };
    let (first, second) = (disc("first")?, disc("second")?);
    let reads = |wanted: &str| {
        let read = "dd if=/dev/sr0 bs=2048 count=1 2>&1 | tr -d '\\0'";
        shell.expect_contains(read, &[wanted])
    };
    let (added, removed) = ("added volume cd", "removed volume cd");
    reads("No medium found")?;
    sync(ctx, &with("first"), &at("cd", &first))?.says(&[added])?;
    reads("this is the first disc")?;
    // Another claim is another disc.
    sync(ctx, &with("second"), &at("cd", &second))?.says(&[removed, added])?;
    reads("this is the second disc")?;
    // The kernel locks the tray while the drive is open. No program in this guest acts on eject requests.
    shell.ok("exec 5</dev/sr0")?;
    sync(ctx, empty, &[])?.fails_with(1, &["volume cd", "prevents removal"])?;
    reads("this is the second disc")?;
    shell.ok("exec 5<&-")?;
    sync(ctx, empty, &[])?.says(&[removed])?;
    reads("No medium found")
}

/// Waits until the guest's disk has the given size.
fn has(shell: &Shell<'_>, disk: &str, mebibytes: u64) -> Result<()> {
    let sectors = mebibytes * MIB / 512;
    shell.ok(&format!(
        "i=0; until [ $(cat /sys/block/{disk}/size) = {sectors} ]; do [ $i -lt 300 ] || exit 1; \
         i=$((i + 1)); sleep 0.2; done"
    ))?;
    Ok(())
}
