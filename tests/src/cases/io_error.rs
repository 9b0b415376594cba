//! `errorPolicy` when the host's disk is full.

use super::full_disk::{fill, small_filesystem};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::time::Duration;

pub const STOP: Case = Case {
    name: "io-error-stop",
    about: "without errorPolicy a full disk on the host pauses the VM; with room again it goes on by itself",
    limit: SMALL,
    run: |ctx| with_policies(ctx, &[None]),
};

pub const POLICIES: Case = Case {
    name: "io-error-policies",
    about: "the same with the policies stop and enospace",
    limit: Duration::from_secs(480),
    run: |ctx| with_policies(ctx, &[Some("stop"), Some("enospace")]),
};

pub const REPORT: Case = Case {
    name: "io-error-report",
    about: "report: a full disk on the host is an I/O error in the guest, and room again is room for the guest",
    limit: SMALL,
    run: reports,
};

/// Bytes that the guest writes: more than fit while the filler is there.
const WRITTEN: u64 = 12 << 20;
/// Space for the guest's disk while the filler is there.
const ROOM: u64 = 4 << 20;
/// Maximum time until the monitor has tried the requests again.
const RETRIED: Duration = Duration::from_secs(120);

fn manifest(name: &str, policy: Option<&str>) -> Result<Manifest> {
    let manifest = Manifest::new(name).empty_disk("data", "64Mi");
    let manifest = match policy {
        Some(policy) => manifest.set("/domain/devices/disks/0/errorPolicy", json!(policy)),
        None => manifest,
    };
    Ok(manifest.small(&images::small("6.12")?, "disks,shell"))
}

/// Fills the filesystem at `folder`, except [`ROOM`].
pub(super) fn leave_little(folder: &Path) -> Result<()> {
    let spare = folder.join("spare");
    let file = File::create(&spare)?;
    fallocate(&file, FallocateFlags::empty(), 0, ROOM).context("cannot set room aside")?;
    fill(folder)?;
    std::fs::remove_file(spare)?;
    Ok(())
}

fn with_policies(ctx: &TestContext, policies: &[Option<&str>]) -> Result<()> {
    let scratch = ctx.path("scratch");
    small_filesystem(ctx, &scratch, "24M")?;
    for &policy in policies {
        ctx.part(policy.unwrap_or("default"), || stops(ctx, policy));
    }
    unmount(&scratch, UnmountFlags::empty())?;
    Ok(())
}

pub(super) fn paused_for_it(vm: &Value) -> bool {
    vm["paused"] == true && vm["reason"] == "PausedIOError"
}

fn stops(ctx: &TestContext, policy: Option<&str>) -> Result<()> {
    let scratch = ctx.path("scratch");
    let vm = Vm::start(ctx, &manifest("stops", policy)?)?;
    let shell = Shell::small(&vm)?;
    shell.ok(&format!("head -c {WRITTEN} /dev/urandom > /all"))?;
    let sum = shell.ok("md5sum < /all")?;
    leave_little(&scratch)?;
    shell.send("dd if=/all of=/dev/vda bs=64k conv=fsync status=none; printf 'husk-%s: %d\\n' written $?")?;
    let seen = vm.until("paused for an I/O error", TIMEOUT, paused_for_it)?;
    expect_contains(seen["message"].as_str().context("no message")?, &["\"data\""])?;
    ensure!(seen["phase"] == "Running", "{seen:#}");

    // Resumed too early, the VM is paused again.
    ctx.run(&["resume", vm.name()])?.ok()?;
    vm.until("paused once more", TIMEOUT, paused_for_it)?;
    let said = vm.console().output().rest();
    ensure!(
        !said.contains("husk-written:") && !said.contains("I/O error"),
        "the guest was told something: {said}"
    );

    std::fs::remove_file(scratch.join("filler"))?;
    if vm.console().expect("husk-written: 0\n", RETRIED).is_err() {
        bail!("there is room, and the guest does not go on: {:#}", vm.inspect()?);
    }
    let seen = vm.inspect()?;
    ensure!(
        seen["paused"] == false && seen["reason"].is_null(),
        "it runs and says otherwise: {seen:#}"
    );
    shell.ok("echo 3 > /proc/sys/vm/drop_caches")?;
    let now = shell.ok(&format!("head -c {WRITTEN} /dev/vda | md5sum"))?;
    ensure!(now == sum, "the disk holds something else: {now}, not {sum}");
    shell.ok("! dmesg | grep 'I/O error'")?;
    shell.send("poweroff -f")?;
    vm.powered_off()
}

fn reports(ctx: &TestContext) -> Result<()> {
    let scratch = ctx.path("scratch");
    small_filesystem(ctx, &scratch, "24M")?;
    let vm = Vm::start(ctx, &manifest("reports", Some("report"))?)?;
    let shell = Shell::small(&vm)?;
    leave_little(&scratch)?;
    let write = format!(
        "dd if=/dev/urandom of=/dev/vda bs=64k count={} conv=fsync status=none",
        WRITTEN >> 16
    );
    let (status, text) = shell.run(&write, TIMEOUT)?;
    ensure!(status != 0, "the guest's write went well: {text}");
    shell.ok("dmesg | grep 'I/O error, dev vda'")?;
    let seen = vm.inspect()?;
    ensure!(
        seen["paused"] == false && seen["reason"].is_null(),
        "not as if nothing had happened: {seen:#}"
    );
    std::fs::remove_file(scratch.join("filler"))?;
    shell.ok(&write)?;
    shell.send("poweroff -f")?;
    vm.powered_off()?;
    unmount(&scratch, UnmountFlags::empty())?;
    Ok(())
}
