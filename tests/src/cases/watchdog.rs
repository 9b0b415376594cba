//! The watchdog, with Linux' driver and busybox's keeper.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, images};
use anyhow::{Result, ensure};
use serde_json::json;
use std::thread::sleep;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "watchdog",
    about: "i6300esb: a kept guest runs on, a paused one is not bitten, a closed one is off; reset, power off, shut down and pause",
    limit: Duration::from_secs(420),
    run,
};

/// The driver, without the kernel's words on the console when a keeper is killed.
const DRIVER: &str = "dmesg -n 1; for module in $(cat /lib/i6300esb); do insmod /lib/$module; done";
const STATUS: &str = "cat /sys/class/watchdog/watchdog0/bootstatus";
/// Reloads it each second; it runs out after six.
const KEEPER: &str = "watchdog -F -t 1 -T 6 /dev/watchdog & echo $! > /keeper";
/// Time after which a watchdog without a keeper has run out.
const RUN_OUT: Duration = Duration::from_secs(15);

fn run(ctx: &TestContext) -> Result<()> {
    ctx.part("reset", || reset(ctx));
    ctx.part("poweroff", || poweroff(ctx));
    ctx.part("shutdown", || shutdown(ctx));
    ctx.part("pause", || pause(ctx));
    ctx.part("none", || none(ctx));
    Ok(())
}

fn start<'s>(ctx: &'s TestContext, action: &str, words: &str) -> Result<Vm<'s>> {
    let manifest = Manifest::new(action)
        .set(
            "/domain/devices/watchdog",
            json!({"name": "dog", "i6300esb": {"action": action}}),
        )
        .small(&images::small("6.12-devices")?, words);
    Vm::start(ctx, &manifest)
}

/// Kills the keeper, which then cannot stop the watchdog.
fn kill_keeper(shell: &Shell<'_>) -> Result<()> {
    shell.ok("kill -9 $(cat /keeper)").map(drop)
}

fn reset(ctx: &TestContext) -> Result<()> {
    let vm = start(ctx, "reset", "shell")?;
    let shell = Shell::small(&vm)?;
    shell.ok(DRIVER)?;
    shell.expect_contains("cat /sys/class/watchdog/watchdog0/identity", &["i6300ESB"])?;
    ensure!(shell.ok(STATUS)?.trim() == "0", "bitten before it began");

    // Off again after the magic close.
    shell.ok("exec 3> /dev/watchdog; echo -n V >&3; exec 3>&-")?;
    sleep(RUN_OUT);
    shell.ok("true")?;

    shell.ok(KEEPER)?;
    sleep(RUN_OUT);
    shell.ok("true")?;
    ctx.run(&["pause", "reset"])?.ok()?;
    sleep(RUN_OUT);
    ctx.run(&["resume", "reset"])?.ok()?;
    sleep(Duration::from_secs(3));
    shell.ok("true")?;
    ensure!(vm.inspect()?["reboots"] == 0, "{}", vm.inspect()?);

    kill_keeper(&shell)?;
    vm.expect("HUSK-USERSPACE")?;
    let shell = Shell::small(&vm)?;
    vm.until("reset", TIMEOUT, |vm| vm["reboots"] == 1)?;
    shell.ok(DRIVER)?;
    // WDIOF_CARDRESET
    ensure!(shell.ok(STATUS)?.trim() == "32", "{}", shell.ok(STATUS)?);
    // Off until somebody opens it.
    sleep(RUN_OUT);
    shell.ok("true")?;
    ctx.run(&["logs", "reset", "--monitor"])?
        .says(&["the guest's watchdog ran out", "ACTION_RESET"])?;
    vm.discard()
}

fn poweroff(ctx: &TestContext) -> Result<()> {
    let vm = start(ctx, "poweroff", "shell")?;
    let shell = Shell::small(&vm)?;
    shell.ok(&format!("{DRIVER}; {KEEPER}"))?;
    kill_keeper(&shell)?;
    vm.end(TIMEOUT)?
        .fails_with(14, &["watchdog ran out, and its action is to power off"])
}

fn shutdown(ctx: &TestContext) -> Result<()> {
    let vm = start(ctx, "shutdown", "button,shell")?;
    vm.expect("husk-button: ready")?;
    let shell = Shell::small(&vm)?;
    shell.ok(&format!("{DRIVER}; {KEEPER}"))?;
    kill_keeper(&shell)?;
    vm.expect("husk-button: pressed")?;
    vm.powered_off()
}

fn pause(ctx: &TestContext) -> Result<()> {
    let vm = start(ctx, "pause", "shell")?;
    let shell = Shell::small(&vm)?;
    shell.ok(&format!("{DRIVER}; {KEEPER}"))?;
    kill_keeper(&shell)?;
    let seen = vm.until("paused", TIMEOUT, |vm| vm["paused"] == true)?;
    ensure!(seen["reason"] == "PausedWatchdog", "{seen}");
    ctx.run(&["list"])?.says(&["Running (PausedWatchdog)"])?;
    vm.run().expect("paused: the guest's watchdog ran out", TIMEOUT)?;
    ctx.run(&["resume", "pause"])?.ok()?;
    sleep(RUN_OUT);
    shell.ok("true")?;
    ensure!(vm.inspect()?["paused"] == false, "{}", vm.inspect()?);
    vm.discard()
}

/// A VM whose manifest asks for none has none.
fn none(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("none").small(&images::small("6.12-devices")?, "shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok(DRIVER)?;
    shell.ok("[ ! -e /dev/watchdog ] && ! grep -q 0x25ab /sys/bus/pci/devices/*/device")?;
    vm.discard()
}
