//! The processes of a VM, killed one at a time.

use crate::harness::context::TestContext;
use crate::harness::manifest::Manifest;
use crate::harness::processes::gone;
use crate::harness::vm::{Vm, console};
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::{Result, ensure};
use std::thread::sleep;
use std::time::Duration;

pub const VMM: Case = Case {
    name: "killed-vmm",
    about: "kill -9 of the VMM: husk run tells, and nothing is left",
    limit: SMALL,
    run: |ctx| {
        let vm = start(ctx)?;
        vm.kill("vmmPid")?;
        vm.end(Duration::from_secs(20))?.fails_with(1, &["SIGKILL"])
    },
};

pub const MONITOR: Case = Case {
    name: "killed-monitor",
    about: "kill -9 of the monitor: the VMM ends with it, husk run tells, and nothing is left",
    limit: SMALL,
    run: |ctx| {
        let vm = start(ctx)?;
        let vmm = vm.pid("vmmPid")?;
        vm.kill("monitorPid")?;
        gone(vmm, Duration::from_secs(10))?;
        vm.end(Duration::from_secs(20))?
            .fails_with(1, &["monitor died"])?;
        // The name is free again.
        let vm = start(ctx)?;
        vm.discard()
    },
};

pub const COMMAND: Case = Case {
    name: "killed-command",
    about: "kill -9 of husk run: the VM goes on and answers every other command",
    limit: SMALL,
    run: |ctx| {
        let vm = start(ctx)?;
        vm.run().kill()?;
        sleep(Duration::from_secs(2));
        ensure!(ctx.list()? == ["victim"], "the VM is not listed");
        ensure!(vm.inspect()?["phase"] == "Running", "the VM does not run");
        let session = console(ctx, "victim")?;
        session.expect("HUSK-USERSPACE", TIMEOUT)?;
        vm.expect("husk-button: ready")?;
        ctx.run_within(&["stop", "victim"], TIMEOUT)?.ok()?;
        ctx.nothing_left(Duration::from_secs(10))
    },
};

fn start(ctx: &TestContext) -> Result<Vm<'_>> {
    let manifest = Manifest::new("victim")
        .empty_disk("data", "64Mi")
        .small(&images::small("6.12")?, "button");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("HUSK-USERSPACE")?;
    Ok(vm)
}
