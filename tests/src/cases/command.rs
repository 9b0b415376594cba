//! Commands that manage a VM's life cycle.

use crate::harness::context::TestContext;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::{Result, ensure};
use std::time::Duration;

pub const DOCTOR: Case = Case {
    name: "doctor",
    about: "husk doctor finds that VMs can run here, in words and as JSON",
    limit: SMALL,
    run: |ctx| {
        ctx.run(&["doctor"])?.says(&["can run VMs"])?;
        let report = ctx.json(&["doctor", "--json"])?;
        ensure!(report["canRunVms"] == true, "{report:#}");
        let checks = report["checks"].as_array().map_or(0, Vec::len);
        ensure!(checks >= 5, "only {checks} checks");
        Ok(())
    },
};

pub const LIFE: Case = Case {
    name: "commands",
    about: "run --detach, list, inspect, logs, stop and rm, from two namespaces in one file",
    limit: SMALL,
    run: life,
};

fn life(ctx: &TestContext) -> Result<()> {
    ensure!(ctx.list()?.is_empty(), "VMs before the first was started");
    let image = images::small("6.12")?;
    let one = Manifest::new("one").small(&image, "button");
    let mut words = one.run_words(ctx)?;
    // The same VM in two namespaces: two documents in one file.
    let file = ctx.path("one.yaml");
    let text = std::fs::read_to_string(&file)?;
    let other = text.replacen(
        "\"name\": \"one\"",
        "\"name\": \"one\", \"namespace\": \"test\"",
        1,
    );
    std::fs::write(&file, format!("{text}\n---\n{other}\n"))?;
    words.push("--detach".into());
    ctx.run_within(&words, TIMEOUT)?.says(&["one\n", "test/one\n"])?;
    ensure!(ctx.list()? == ["one", "test/one"], "listed: {:?}", ctx.list()?);
    ctx.run(&["list"])?
        .says(&["NAMESPACE", "default", "test", "one", "Running", "256Mi"])?;
    let seen = ctx.json(&["inspect", "test/one", "-o", "json"])?;
    ensure!(
        seen["namespace"] == "test" && seen["cpus"] == 1 && seen["memoryBytes"] == 256 << 20,
        "{seen:#}"
    );
    ctx.run_within(&words, TIMEOUT)?
        .fails_with(1, &["already running"])?;
    ensure!(ctx.list()?.len() == 2, "a refused run changed what runs");

    let console = crate::harness::vm::console(ctx, "one")?;
    console.expect("husk-button: ready", TIMEOUT)?;
    ctx.run(&["logs", "one"])?
        .says(&["Linux version", "HUSK-USERSPACE"])?;
    let last = ctx.run(&["logs", "one", "--tail", "1"])?.ok()?;
    ensure!(last.lines().count() == 1, "--tail 1 gave: {last}");
    ensure!(
        ctx.run(&["logs", "one", "--monitor"])?.status == 0,
        "no monitor's log"
    );

    ctx.run_within(&["stop", "one"], TIMEOUT)?.ok()?;
    ensure!(ctx.list()? == ["test/one"], "listed: {:?}", ctx.list()?);
    ctx.run(&["rm", "--force", "test/one"])?.ok()?;
    ctx.nothing_left(Duration::from_secs(10))?;
    ctx.run(&["stop", "one"])?.fails_with(1, &["one"])?;
    // A name is free as soon as its VM has ended.
    let vm = Vm::start(ctx, &one)?;
    vm.expect("HUSK-USERSPACE")?;
    vm.discard()
}
