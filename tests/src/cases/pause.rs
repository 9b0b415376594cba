//! Pause and resume.

use crate::harness::context::TestContext;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::{Context, Result, ensure};
use std::thread::sleep;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "pause",
    about: "a paused guest stands still, and its clocks go on from where they stood",
    limit: SMALL,
    run,
};

/// Length of the pause, longer than any scheduling delay.
const PAUSED: Duration = Duration::from_secs(20);

fn run(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("still")
        .cpu(1, 2, 1)
        .small(&images::small("6.12")?, "clock");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-clock")?;
    ctx.run(&["pause", "still"])?.ok()?;
    ctx.run(&["pause", "still"])?.ok()?;
    ensure!(vm.inspect()?["paused"] == true, "inspect does not say paused");
    // Output from before the pause may still arrive.
    sleep(Duration::from_secs(1));
    let before = clocks(&vm.console().output().all()).context("no clock before the pause")?;
    sleep(PAUSED);
    let during = clocks(&vm.console().output().all()).context("no clock")?;
    ensure!(
        before == during,
        "the paused guest went on: {before:?} {during:?}"
    );
    vm.console().output().expect("(?s).*", TIMEOUT)?;

    ctx.run(&["resume", "still"])?.ok()?;
    ctx.run(&["resume", "still"])?.ok()?;
    let said = vm.expect(r"husk-clock: [^\n]*\n")?;
    let after = clocks(&said[0]).context("no clock after the pause")?;
    ensure!(vm.inspect()?["paused"] == false, "inspect still says paused");
    let limit = PAUSED.as_secs_f64() / 2.0;
    for (name, before, after) in [("uptime", before.0, after.0), ("time of day", before.1, after.1)] {
        let jump = after - before;
        ensure!((0.0..limit).contains(&jump), "the {name} jumped by {jump} s");
    }
    // It continues at its pace, not only once.
    vm.expect("husk-clock")?;
    vm.expect("husk-clock")?;
    vm.discard()
}

/// Uptime and time of day in the last complete line of `text` that has them, in seconds.
fn clocks(text: &str) -> Option<(f64, f64)> {
    let whole = &text[..text.rfind('\n')?];
    let (_, line) = whole.rsplit_once("husk-clock: ")?;
    let (uptime, date) = line.lines().next()?.split_once(' ')?;
    Some((uptime.parse().ok()?, date.parse().ok()?))
}
