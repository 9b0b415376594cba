//! Manifests that are wrong.

use crate::harness::manifest::Manifest;
use crate::harness::scene::{Scene, says};
use crate::harness::{Case, SMALL, images};
use anyhow::{Result, ensure};
use serde_json::json;

pub const CASE: Case = Case {
    name: "bad-manifest",
    about: "each wrong field is one line FIELD: REASON, the status is 2, and nothing is started",
    limit: SMALL,
    run,
};

fn run(scene: &Scene) -> Result<()> {
    let image = images::small("6.12")?;
    let good = Manifest::new("good").small(&image, "poweroff");
    let words = good.run_words(scene)?;
    says(&scene.run(&["validate", "good.yaml"])?.ok()?, &["good is valid"])?;

    let bad = Manifest::new("bad")
        .memory("-1Gi")
        .set("/domain/cpu", json!({"cores": "two"}))
        .set(
            "/domain/devices/disks",
            json!([{"name": "root", "disk": {"bus": "virtio"}}]),
        )
        .small(&image, "poweroff");
    let mut bad_words = bad.run_words(scene)?;
    for words in [&bad_words, &vec!["validate".into(), "bad.yaml".into()]] {
        let text = scene.run(words)?.fails(2)?;
        says(&text, &["spec.domain.cpu.cores", "root"])?;
        for line in text.lines() {
            ensure!(
                line.starts_with("spec.") && line.contains(": "),
                "not FIELD: REASON: {line}"
            );
        }
    }

    // One wrong document of a file keeps the others from starting.
    let both = format!(
        "{}\n---\n{}\n",
        std::fs::read_to_string(scene.path("good.yaml"))?,
        std::fs::read_to_string(scene.path("bad.yaml"))?
    );
    std::fs::write(scene.path("bad.yaml"), both)?;
    bad_words.push("--detach".into());
    scene.run(&bad_words)?.fails(2)?;

    for (name, text) in [
        ("empty.yaml", ""),
        (
            "torn.yaml",
            "apiVersion: kubevirt.io/v1\nkind: [VirtualMachineInstance\n",
        ),
        ("other.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n"),
        ("bytes.yaml", "\u{0}\u{1}\u{2}"),
    ] {
        std::fs::write(scene.path(name), text)?;
        let answer = scene.run(&["run", name])?.fails(2)?;
        ensure!(answer.lines().count() <= 3, "{name}: {answer}");
    }
    scene.run(&["run", "absent.yaml"])?;
    let mut unknown = words;
    unknown.extend(["--volume".into(), "nosuch=/dev/null".into()]);
    says(&scene.run(&unknown)?.fails(2)?, &["nosuch"])?;
    ensure!(scene.list()?.is_empty(), "something was started");
    Ok(())
}
