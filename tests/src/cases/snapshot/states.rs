//! Snapshots of VMs in other states than that of a guest that runs, and with more than disks.

use super::{SAVE, text};
use crate::cases::full_disk::small_filesystem;
use crate::cases::{hotplug, io_error};
use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, images};
use anyhow::{Context, Result, ensure};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::json;
use std::thread::sleep;
use std::time::Duration;

pub const STATES: Case = Case {
    name: "snapshot-states",
    about: "saved while it boots, reboots, is paused, or waits for room on the host; with a plugged disk, huge pages, a balloon",
    limit: Duration::from_secs(1800),
    run,
};

const NAME: &str = "state";
/// The number of huge pages of 2 MiB that the kernel reserves.
const POOL: &str = "/proc/sys/vm/nr_hugepages";

fn run(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    for moment in [200, 1500, 3500] {
        ctx.part(&format!("boots since {moment} ms"), || boots(ctx, moment));
    }
    ctx.part("reboots", || reboots(ctx));
    ctx.part("paused", || paused(ctx));
    ctx.part("a plugged disk", || plugged(ctx));
    ctx.part("a balloon", || balloon(ctx));
    ctx.part("huge pages", || huge_pages(ctx));
    // The last: it leaves a mount namespace behind.
    ctx.part("an I/O error", || waits_for_room(ctx));
    Ok(())
}

fn small(words: &str) -> Result<Manifest> {
    Ok(Manifest::new(NAME)
        .cpu(1, 2, 1)
        .small(&images::small("6.12")?, words))
}

/// Saves `vm`, ends it, and restores it with `more` arguments.
fn saved_and_restored<'c>(ctx: &'c TestContext, vm: Vm<'c>, more: &[&str]) -> Result<Vm<'c>> {
    let dir = ctx.path("snapshot");
    ctx.run_within(&["snapshot", NAME, &text(&dir)], SAVE)?.ok()?;
    vm.discard()?;
    let vm = Vm::restore_with(ctx, &dir, NAME, more)?;
    // It runs from files without a name.
    std::fs::remove_dir_all(&dir)?;
    Ok(vm)
}

fn boots(ctx: &TestContext, moment: u64) -> Result<()> {
    let vm = Vm::start(ctx, &small("disks,shell")?)?;
    sleep(Duration::from_millis(moment));
    let vm = saved_and_restored(ctx, vm, &[])?;
    let shell = Shell::going_on(vm.console())?;
    shell.expect_contains("grep -c ^processor /proc/cpuinfo", &["2"])?;
    vm.power_off(&shell)
}

fn reboots(ctx: &TestContext) -> Result<()> {
    let vm = Vm::start(ctx, &small("disks,shell")?)?;
    Shell::small(&vm)?.send("reboot -f")?;
    vm.until("rebooted", TIMEOUT, |vm| vm["reboots"] == 1)?;
    let vm = saved_and_restored(ctx, vm, &[])?;
    let shell = Shell::going_on(vm.console())?;
    vm.power_off(&shell)
}

fn paused(ctx: &TestContext) -> Result<()> {
    let vm = Vm::start(ctx, &small("shell")?)?;
    Shell::small(&vm)?.ok("mkdir -p /tmp; echo kept > /tmp/word")?;
    ctx.run(&["pause", NAME])?.ok()?;
    let vm = saved_and_restored(ctx, vm, &["--paused"])?;
    let seen = vm.inspect()?;
    ensure!(seen["paused"] == true, "it runs: {seen:#}");
    ctx.run(&["resume", NAME])?.ok()?;
    let shell = Shell::going_on(vm.console())?;
    shell.expect_contains("cat /tmp/word", &["kept"])?;
    vm.power_off(&shell)
}

fn plugged(ctx: &TestContext) -> Result<()> {
    let vm = Vm::start(ctx, &small("scsi,shell")?)?;
    let shell = hotplug::shell(&vm)?;
    let image = hotplug::image(ctx, "first", 8)?;
    hotplug::add(ctx, &vm, "first", &image)?;
    let device = hotplug::comes(&shell, "first")?;
    shell.ok(&format!(
        "echo on the first | dd of=/dev/{device} bs=512 conv=sync,fsync status=none"
    ))?;
    let vm = saved_and_restored(ctx, vm, &[])?;
    let shell = Shell::going_on(vm.console())?;
    shell.ok("echo 3 > /proc/sys/vm/drop_caches")?;
    shell.expect_contains(&format!("head -c 12 /dev/{device}"), &["on the first"])?;
    hotplug::add(ctx, &vm, "second", &hotplug::image(ctx, "second", 8)?)?;
    hotplug::comes(&shell, "second")?;
    for name in ["first", "second"] {
        hotplug::remove(ctx, &vm, name)?;
        hotplug::goes(&shell, name)?;
    }
    vm.power_off(&shell)
}

fn balloon(ctx: &TestContext) -> Result<()> {
    let vm = Vm::start(ctx, &small("balloon,shell")?)?;
    let shell = Shell::small(&vm)?;
    shell.ok("mkdir /t && mount -t tmpfs -o size=200m t /t && head -c 8388608 /dev/urandom > /t/kept")?;
    let copies = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do cp /t/kept /t/$i || exit 1; done";
    shell.ok(copies)?;
    let sum = shell.ok("md5sum < /t/kept")?;
    // The guest reports pages as free before and after.
    shell.ok("rm /t/[0-6]; sleep 2")?;
    let vm = saved_and_restored(ctx, vm, &[])?;
    let shell = Shell::going_on(vm.console())?;
    for file in ["kept", "7", "12"] {
        let now = shell.ok(&format!("md5sum < /t/{file}"))?;
        ensure!(now == sum, "{file} has changed");
    }
    shell.ok("rm /t/[0-9]*; sleep 2")?;
    shell.ok(copies)?;
    for file in ["kept", "1", "12"] {
        let now = shell.ok(&format!("md5sum < /t/{file}"))?;
        ensure!(now == sum, "{file} differs after pages were given back");
    }
    vm.power_off(&shell)
}

fn huge_pages(ctx: &TestContext) -> Result<()> {
    let before = std::fs::read_to_string(POOL)?;
    std::fs::write(POOL, "136").context("huge pages")?;
    let done = with_huge_pages(ctx);
    std::fs::write(POOL, before.trim())?;
    done
}

fn with_huge_pages(ctx: &TestContext) -> Result<()> {
    let manifest = small("shell")?.set("/domain/memory", json!({"hugepages": {"pageSize": "2Mi"}}));
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok("mkdir -p /tmp; head -c 8388608 /dev/urandom > /tmp/kept")?;
    let sum = shell.ok("md5sum < /tmp/kept")?;
    let vm = saved_and_restored(ctx, vm, &[])?;
    let shell = Shell::going_on(vm.console())?;
    let now = shell.ok("md5sum < /tmp/kept")?;
    ensure!(now == sum, "the memory has changed");
    vm.power_off(&shell)
}

fn waits_for_room(ctx: &TestContext) -> Result<()> {
    let scratch = ctx.path("scratch");
    small_filesystem(ctx, &scratch, "40M")?;
    let manifest = Manifest::new(NAME)
        .empty_disk("data", "64Mi")
        .small(&images::small("6.12")?, "disks,shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok("dmesg -n 1; head -c 12582912 /dev/urandom > /all")?;
    let sum = shell.ok("md5sum < /all")?;
    io_error::leave_little(&scratch)?;
    shell.send("dd if=/all of=/dev/vda bs=64k conv=fsync status=none; echo $? > /status")?;
    vm.until("paused for an I/O error", TIMEOUT, io_error::paused_for_it)?;
    let dir = ctx.path("snapshot");
    ctx.run_within(&["snapshot", NAME, &text(&dir)], SAVE)?.ok()?;
    vm.discard()?;
    std::fs::remove_file(scratch.join("filler"))?;
    let vm = Vm::restore(ctx, &dir, NAME)?;
    std::fs::remove_dir_all(&dir)?;
    // The requests that waited are tried again once it runs.
    if vm.inspect()?["paused"] == true {
        ctx.run(&["resume", NAME])?.ok()?;
    }
    let shell = Shell::going_on(vm.console())?;
    shell.expect_contains("until [ -e /status ]; do sleep 0.1; done; cat /status", &["0"])?;
    shell.ok("echo 3 > /proc/sys/vm/drop_caches")?;
    let now = shell.ok("head -c 12582912 /dev/vda | md5sum")?;
    ensure!(now == sum, "the disk holds something else");
    shell.ok("! dmesg | grep 'I/O error'")?;
    vm.power_off(&shell)?;
    unmount(&scratch, UnmountFlags::empty())?;
    Ok(())
}
