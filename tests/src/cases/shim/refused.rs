//! Pods that cannot be VMs: `create` gives the reason, and leaves nothing behind.

use super::ctr::{LIMIT, OWN, vm};
use crate::harness::Case;
use crate::harness::containerd::image::{Image, name};
use crate::harness::containerd::{Containerd, RUNTIME, Version};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::manifest::Manifest;
use crate::harness::pod::Node;
use anyhow::{Result, ensure};
use serde_json::json;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "shim-refused",
    about: "annotations, VMIs, images, limits and networks that cannot be a VM: the reason, and nothing left",
    limit: LIMIT,
    run,
};

fn run(ctx: &TestContext) -> Result<()> {
    let containerd = super::ctr::with_small(ctx, Version::V2_1)?;
    let c = &containerd;
    let disk = || Manifest::new("vm").disk("root", json!({"containerDisk": {"image": "any"}}));
    let image = |name| Image::new(ctx, name);
    image("empty")?.bytes("/etc/hello", b"x")?.import(c, OWN)?;
    image("two")?
        .bytes("/disk/a", &[0; 512])?
        .bytes("/disk/b", &[0; 512])?
        .import(c, OWN)?;
    image("shadow")?
        .link("/disk/disk.img", "/etc/shadow")?
        .import(c, OWN)?;
    image("above")?
        .link("/disk/disk.img", "../../../../../../../../etc/shadow")?
        .import(c, OWN)?;
    image("pipe")?.fifo("/disk/disk.img")?.import(c, OWN)?;

    let refused = |name: &str, manifest: &Manifest, options: &[&str], image: &str, words: &[&str]| {
        ctx.part(name, || {
            let answer = c.run(manifest, options, image, name)?;
            ensure!(answer.status != 0, "it was not refused:\n{}", answer.text);
            ensure!(!answer.text.contains("panicked at"), "a panic:\n{}", answer.text);
            expect_contains(&answer.text, words)?;
            c.nothing_left()
        });
    };
    refused(
        "no-disk",
        &disk(),
        &[],
        "empty",
        &[
            "volume \"root\"",
            "no file found in folder",
            "/disk, no disk present",
        ],
    );
    refused(
        "two-files",
        &disk(),
        &[],
        "two",
        &[
            "more than one file found in folder",
            "/disk, only one disk is allowed",
        ],
    );
    refused("symlink", &disk(), &[], "shadow", &["disk.img"]);
    refused("dots", &disk(), &[], "above", &["disk.img"]);
    refused("fifo", &disk(), &[], "pipe", &["disk.img is a FIFO"]);
    refused(
        "memory",
        &vm("poweroff").memory("1Ki"),
        &[],
        "small",
        &["spec.domain.resources.requests.memory"],
    );
    refused(
        "field",
        &vm("poweroff").set("/domain/memroy", json!("1Gi")),
        &[],
        "small",
        &["spec.domain.memroy"],
    );
    let host_disk = json!({"hostDisk": {"path": "/etc/shadow", "type": "Disk"}});
    refused(
        "host-disk",
        &vm("poweroff").disk("data", host_disk),
        &[],
        "small",
        &[
            "spec.volumes[0].hostDisk.path",
            "/var/run/kubevirt-private/vmi-disks/data",
        ],
    );
    refused(
        "limit",
        &vm("poweroff"),
        &["--memory-limit", "67108864"],
        "small",
        &["the memory limit of", " is 64 MiB", "128 MiB for the guest"],
    );
    refused(
        "network",
        &vm("poweroff").pod_interface(json!({"bridge": {}})),
        &["--with-ns", "network:/proc/self/nothing"],
        "small",
        &["/proc/self/nothing"],
    );
    let node = Node::new(ctx, 1500)?;
    let pod = node.pod(7)?;
    pod.run("ip link add tap0 type dummy")?;
    let before = pod.netns.state()?;
    let namespace = format!("network:{}", pod.netns.path().display());
    refused(
        "tap",
        &vm("poweroff").pod_interface(json!({"bridge": {}})),
        &["--with-ns", &namespace],
        "small",
        &["tap0"],
    );
    ctx.part("tap-as-it-was", || {
        pod.netns.returns_to(&before, Duration::from_secs(10))
    });
    annotations(c);
    Ok(())
}

/// Texts that are not manifests.
fn annotations(c: &Containerd<'_>) {
    for (part, annotation, words) in [
        ("no-annotation", None, "husk.io/vmi"),
        ("no-json", Some("husk.io/vmi={\"kind\": "), "husk.io/vmi"),
        (
            "other-kind",
            Some("husk.io/vmi={\"apiVersion\": \"v1\", \"kind\": \"Pod\"}"),
            "found Pod",
        ),
    ] {
        c.ctx().part(part, || {
            let image = name("small");
            let mut run = vec!["run", "--runtime", RUNTIME];
            run.extend(annotation.iter().flat_map(|text| ["--annotation", text]));
            run.extend([image.as_str(), part]);
            let answer = c.ctr(&run)?;
            c.ctr(&["containers", "rm", part])?;
            ensure!(answer.status != 0, "it was not refused:\n{}", answer.text);
            expect_contains(&answer.text, &[words])?;
            c.nothing_left()
        });
    }
}
