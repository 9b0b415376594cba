//! Tests of `husk stop`.

use crate::harness::context::TestContext;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

pub const BUTTON: Case = Case {
    name: "stop",
    about: "husk stop presses the power button; the guest powers off and the VM ends with status 0",
    limit: SMALL,
    run: |ctx| button(ctx, "6.12"),
};

pub const BUTTON_ON_6_1: Case = Case {
    name: "stop-6.1",
    about: "the same with kernel 6.1",
    limit: SMALL,
    run: |ctx| button(ctx, "6.1"),
};

pub const GRACE: Case = Case {
    name: "stop-grace",
    about: "a guest that does not answer the power button is killed after its grace period; rm -f needs none",
    limit: SMALL,
    run: grace,
};

fn button(ctx: &TestContext, kernel: &str) -> Result<()> {
    let manifest = Manifest::new("stop").small(&images::small(kernel)?, "button");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-button: ready")?;
    ctx.run_within(&["stop", "stop"], TIMEOUT)?
        .says(&["powered off"])?;
    vm.expect("husk-button: pressed")?;
    vm.powered_off()
}

fn grace(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("deaf").small(&images::small("6.12")?, "spin");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("HUSK-USERSPACE")?;
    let asked = Instant::now();
    let words = ["stop", "deaf", "--grace-period", "3"];
    ctx.run_within(&words, TIMEOUT)?.ok()?;
    let took = asked.elapsed();
    ensure!(took >= Duration::from_secs(3), "killed after {took:?}");
    vm.end(TIMEOUT)?
        .fails_with(1, &["did not power off within 3 s"])?;

    let vm = Vm::start(ctx, &manifest)?;
    ctx.run(&["rm", "--force", "deaf"])?.ok()?;
    vm.end(TIMEOUT)?.fails_with(1, &["killed on request"])
}
