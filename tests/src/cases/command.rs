//! The commands around a VM's life.

use crate::harness::manifest::Manifest;
use crate::harness::scene::{Scene, says};
use crate::harness::vm::Vm;
use crate::harness::{Case, PATIENCE, SMALL, images};
use anyhow::{Result, ensure};
use std::time::Duration;

pub const DOCTOR: Case = Case {
    name: "doctor",
    about: "husk doctor finds that VMs can run here, in words and as JSON",
    limit: SMALL,
    run: |scene| {
        says(&scene.run(&["doctor"])?.ok()?, &["can run VMs"])?;
        let report = scene.json(&["doctor", "--json"])?;
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

fn life(scene: &Scene) -> Result<()> {
    ensure!(scene.list()?.is_empty(), "VMs before the first was started");
    let image = images::small("6.12")?;
    let one = Manifest::new("one").small(&image, "button");
    let mut words = one.run_words(scene)?;
    // The same VM in two namespaces: two documents in one file.
    let file = scene.path("one.yaml");
    let text = std::fs::read_to_string(&file)?;
    let other = text.replacen(
        "\"name\": \"one\"",
        "\"name\": \"one\", \"namespace\": \"test\"",
        1,
    );
    std::fs::write(&file, format!("{text}\n---\n{other}\n"))?;
    words.push("--detach".into());
    let started = scene.finish(scene.husk(&words), PATIENCE)?.ok()?;
    says(&started, &["one\n", "test/one\n"])?;
    ensure!(
        scene.list()? == ["one", "test/one"],
        "listed: {:?}",
        scene.list()?
    );
    says(
        &scene.run(&["list"])?.ok()?,
        &["NAMESPACE", "default", "test", "one", "Running", "256Mi"],
    )?;
    let seen = scene.json(&["inspect", "test/one", "-o", "json"])?;
    ensure!(
        seen["namespace"] == "test" && seen["cpus"] == 1 && seen["memoryBytes"] == 256 << 20,
        "{seen:#}"
    );
    let again = scene.finish(scene.husk(&words), PATIENCE)?.fails(1)?;
    says(&again, &["already running"])?;
    ensure!(scene.list()?.len() == 2, "a refused run changed what runs");

    let console = crate::harness::vm::console(scene, "one")?;
    console.expect("husk-button: ready", PATIENCE)?;
    says(
        &scene.run(&["logs", "one"])?.ok()?,
        &["Linux version", "HUSK-USERSPACE"],
    )?;
    let last = scene.run(&["logs", "one", "--tail", "1"])?.ok()?;
    ensure!(last.lines().count() == 1, "--tail 1 gave: {last}");
    ensure!(
        scene.run(&["logs", "one", "--monitor"])?.status == 0,
        "no monitor's log"
    );

    scene.finish(scene.husk(&["stop", "one"]), PATIENCE)?.ok()?;
    ensure!(scene.list()? == ["test/one"], "listed: {:?}", scene.list()?);
    scene.run(&["rm", "--force", "test/one"])?.ok()?;
    scene.nothing_left(Duration::from_secs(10))?;
    says(&scene.run(&["stop", "one"])?.fails(1)?, &["one"])?;
    starts_again(scene, &one)
}

/// A name is free as soon as its VM has ended.
fn starts_again(scene: &Scene, manifest: &Manifest) -> Result<()> {
    let vm = Vm::start(scene, manifest)?;
    vm.expect("HUSK-USERSPACE")?;
    vm.discard()
}
