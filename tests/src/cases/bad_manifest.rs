//! Invalid manifests.

use crate::harness::context::{TestContext, expect_contains};
use crate::harness::manifest::Manifest;
use crate::harness::{Case, SMALL, images};
use anyhow::{Result, ensure};
use serde_json::json;

pub const CASE: Case = Case {
    name: "bad-manifest",
    about: "each wrong field is one line FIELD: REASON, the status is 2, and nothing is started",
    limit: SMALL,
    run,
};

fn run(ctx: &TestContext) -> Result<()> {
    let image = images::small("6.12")?;
    let good = Manifest::new("good").small(&image, "poweroff");
    let words = good.run_words(ctx)?;
    ctx.run(&["validate", "good.yaml"])?.says(&["good is valid"])?;

    // As with KubeVirt, wrong types are reported first, and wrong values only if there are none.
    let mistyped = Manifest::new("bad").set("/domain/cpu", json!({"cores": "two"}));
    lines(ctx, &mistyped, &["spec.domain.cpu.cores"])?;
    let bad = Manifest::new("bad")
        .memory("-1Gi")
        .set(
            "/domain/devices/disks",
            json!([{"name": "nosuch", "disk": {"bus": "virtio"}}]),
        )
        .small(&image, "poweroff");
    lines(
        ctx,
        &bad,
        &[
            "spec.domain.resources.requests.memory",
            "spec.domain.devices.disks[0].name",
        ],
    )?;
    let mut bad_words = bad.run_words(ctx)?;

    // One invalid document in a file prevents the others from starting.
    let both = format!(
        "{}\n---\n{}\n",
        std::fs::read_to_string(ctx.path("good.yaml"))?,
        std::fs::read_to_string(ctx.path("bad.yaml"))?
    );
    std::fs::write(ctx.path("bad.yaml"), both)?;
    bad_words.push("--detach".into());
    ctx.run(&bad_words)?.fails(2)?;

    for (name, text) in [
        ("empty.yaml", ""),
        (
            "torn.yaml",
            "apiVersion: kubevirt.io/v1\nkind: [VirtualMachineInstance\n",
        ),
        ("other.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n"),
        ("bytes.yaml", "\u{0}\u{1}\u{2}"),
    ] {
        std::fs::write(ctx.path(name), text)?;
        let answer = ctx.run(&["run", name])?.fails(2)?;
        ensure!(answer.lines().count() <= 3, "{name}: {answer}");
    }
    ctx.run(&["run", "absent.yaml"])?
        .fails_with(2, &["absent.yaml"])?;
    let mut unknown = words;
    unknown.extend(["--volume".into(), "nosuch=/dev/null".into()]);
    ctx.run(&unknown)?.fails_with(2, &["nosuch"])?;
    ensure!(ctx.list()?.is_empty(), "something was started");
    Ok(())
}

/// Checks that `husk run` and `husk validate` refuse `manifest` with one line for each of `fields`.
fn lines(ctx: &TestContext, manifest: &Manifest, fields: &[&str]) -> Result<()> {
    for words in [
        manifest.run_words(ctx)?,
        vec!["validate".into(), "bad.yaml".into()],
    ] {
        let text = ctx.run(&words)?.fails(2)?;
        for line in text.lines() {
            let field = line.split_once(": ").map(|(field, _)| field);
            ensure!(
                field.is_some_and(|field| fields.contains(&field)),
                "not FIELD: REASON: {line}"
            );
        }
        for field in fields {
            expect_contains(&text, &[&format!("{field}: ")])?;
        }
    }
    Ok(())
}
