//! A guest's reboot starts the machine again in the same VM.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::{Result, ensure};

pub const CASE: Case = Case {
    name: "reboot",
    about: "a reboot, by the guest and by husk reset, boots again in the same processes; disks keep their data",
    limit: SMALL,
    run,
};

fn run(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("again")
        .cpu(1, 2, 1)
        .empty_disk("data", "64Mi")
        .small(&images::small("6.12")?, "disks,shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok("echo written before > /dev/vda && sync")?;
    let before = vm.inspect()?;
    shell.send("reboot -f")?;

    let shell = Shell::small(&vm)?;
    shell.expect_contains("head -c 14 /dev/vda", &["written before"])?;
    shell.expect_contains("grep -c ^processor /proc/cpuinfo", &["2"])?;
    let after = vm.until("rebooted once", TIMEOUT, |vm| vm["reboots"] == 1)?;
    ensure!(
        before["vmmPid"] == after["vmmPid"] && before["monitorPid"] == after["monitorPid"],
        "other processes: {before:#} {after:#}"
    );
    ensure!(
        vm.run().output().all().contains("again: rebooted"),
        "husk run did not tell"
    );

    ctx.run(&["reset", vm.name()])?.ok()?;
    let shell = Shell::small(&vm)?;
    shell.expect_contains("head -c 14 /dev/vda", &["written before"])?;
    vm.power_off(&shell)
}
