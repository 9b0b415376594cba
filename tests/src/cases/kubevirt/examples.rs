//! Every file of KubeVirt's `examples/`, with local images: what `tests/kubevirt/examples.toml` says becomes of it.

use crate::harness::context::TestContext;
use crate::harness::examples::{self, Example, Images, Verdict};
use crate::harness::kubevirt::objects::{DISK, GUEST, local_volume};
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kubevirt-examples",
    about: "each file of KubeVirt's examples/ runs, or is refused with the text in tests/kubevirt/examples.toml",
    limit: Duration::from_secs(2400),
    run,
};

const VERDICTS: &str = include_str!("../../../kubevirt/examples.toml");
const NAMESPACE: &str = "examples";
const IMAGES: Images = Images {
    disk: DISK,
    kernel: GUEST,
};
/// Folder of the claims' disks on the node.
const DATA: &str = "/var/tmp/husk-examples";
/// Claims that the examples name.
const CLAIMS: [&str; 2] = ["disk-alpine", "disk-custom"];

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?.in_namespace(NAMESPACE);
    let checkout = std::env::var_os("HUSK_KUBEVIRT").context("HUSK_KUBEVIRT is not set")?;
    let folder = Path::new(&checkout).join("examples");
    let examples = examples::read(ctx, &folder, VERDICTS, &IMAGES)?;
    prepare(c)?;
    let (stored, others): (Vec<_>, Vec<_>) = examples
        .iter()
        .partition(|example| matches!(example.verdict, Verdict::Applies));
    for example in &stored {
        ctx.part(&example.file, || apply(c, example)?.map_err(anyhow::Error::msg));
    }
    for example in &others {
        ctx.part(&example.file, || {
            let done = match &example.verdict {
                Verdict::Refused(text) => refused(c, example, text),
                _ => runs(c, example),
            };
            let _ = c.kubectl(&["delete", "-f", &text(&example.path), "--wait=false"]);
            c.until_none(VMI)?;
            done
        });
    }
    for example in &stored {
        let words = ["delete", "-f", &text(&example.path), "--wait=false"];
        c.kubectl(&words)?.ok()?;
    }
    for claim in CLAIMS {
        c.delete("pvc", claim)?;
        c.delete("pv", claim)?;
    }
    c.on_node(&format!("rm -r {DATA}"))?;
    c.delete("pod", "node-shell")?;
    c.until_none("pods")?;
    c.delete("namespace", NAMESPACE)
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// The namespace, whose label chooses Husk for its VMs, and the claims.
fn prepare(c: &KubeVirt<'_>) -> Result<()> {
    c.apply(&[json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"husk.io/runtime": "true"}},
    })])?;
    // A namespace without its service account takes no pods.
    c.until("serviceaccount", "default", ".metadata.name", "default")?;
    let disk = text(&c.path("images/disk.img"));
    for claim in CLAIMS {
        let folder = format!("{DATA}/{claim}");
        c.on_node(&format!(
            "mkdir -p {folder} && cp {disk} {folder}/disk.img && chown -R 107:107 {folder}"
        ))?;
        c.apply(&local_volume(claim, "Filesystem", (&folder, "64Mi"), &c.node()?))?;
    }
    Ok(())
}

/// Applies the file; the API server's refusal is the inner error.
fn apply(c: &KubeVirt<'_>, example: &Example) -> Result<Result<(), String>> {
    let applied = c.kubectl(&["apply", "-f", &text(&example.path)])?;
    met(applied.status == 0, || applied.text)
}

/// Starts a VirtualMachine that is halted.
fn start(c: &KubeVirt<'_>, example: &Example) -> Result<()> {
    if example.kind == "VirtualMachine" {
        c.virtctl(&["start", &example.name])?.ok()?;
    }
    Ok(())
}

/// The columns of `kubectl get vmi`, and the conditions.
fn runs(c: &KubeVirt<'_>, example: &Example) -> Result<()> {
    apply(c, example)?.map_err(anyhow::Error::msg)?;
    start(c, example)?;
    let vmis = || -> Result<Vec<Value>> {
        let list = c.kubectl(&["get", VMI, "-o", "json"])?.ok()?;
        let mut list: Value = serde_json::from_str(&list)?;
        Ok(list["items"]
            .as_array_mut()
            .map(std::mem::take)
            .unwrap_or_default())
    };
    c.until_true("a VMI does not run", || {
        let vmis = vmis()?;
        let all = !vmis.is_empty() && vmis.iter().all(is_up);
        let seen = || vmis.iter().map(|vmi| vmi["status"].to_string()).collect();
        met(all, seen)
    })
}

fn is_up(vmi: &Value) -> bool {
    let status = &vmi["status"];
    let condition = |kind: &str| {
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        let found = conditions.find(|condition| condition["type"] == kind);
        found.and_then(|condition| condition["status"].as_str())
    };
    let addresses = status["interfaces"].as_array().is_some_and(|interfaces| {
        let with_address =
            |interface: &Value| interface["ipAddress"].as_str().is_some_and(|ip| !ip.is_empty());
        interfaces.iter().all(with_address)
    });
    status["phase"] == "Running"
        && condition("Ready") == Some("True")
        && condition("LiveMigratable") == Some("False")
        && status["nodeName"].is_string()
        && addresses
}

/// Waits for the text in the API server's answer, an event, a condition or a status, and checks that no VM runs.
fn refused(c: &KubeVirt<'_>, example: &Example, reason: &str) -> Result<()> {
    if let Err(answer) = apply(c, example)? {
        ensure!(answer.contains(reason), "another answer: {answer}");
        return Ok(());
    }
    start(c, example)?;
    c.until_true(&format!("nothing says {reason:?}"), || {
        let mut said = c
            .kubectl(&["get", "events", "-o", "jsonpath={.items[*].message}"])?
            .ok()?;
        said += &c
            .kubectl(&["get", "vm,vmi,pods", "-o", "jsonpath={.items[*].status}"])?
            .ok()?;
        met(said.contains(reason), || said)
    })?;
    let phases = c.field(VMI, "--show-labels=false", ".items[*].status.phase")?;
    ensure!(!phases.contains("Running"), "it runs");
    Ok(())
}
