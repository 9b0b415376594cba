//! A Debian cloud image from a claim, as a user would run it: cloud-init, `virtctl ssh` and `scp`.

use crate::harness::Case;
use crate::harness::context::TestContext;
use crate::harness::images;
use crate::harness::kubevirt::objects::local_volume;
use crate::harness::kubevirt::{KubeVirt, VMI};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

pub const CASE: Case = Case {
    name: "kubevirt-debian",
    about: "Debian from a claim that waits for its first consumer, with cloud-init from a Secret; virtctl ssh, scp",
    limit: Duration::from_secs(1200),
    run,
};

const VM: &str = "debian";
/// Storage class of the disk.
const CLASS: &str = "local-wait";
/// Folder of the disk on the node.
const DATA: &str = "/var/tmp/husk-debian";
/// Time limit from the VM's start until cloud-init has installed the key.
const BOOT: Duration = Duration::from_secs(600);

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    let image = images::disk("debian-13-cloud")?;
    c.on_node(&format!(
        "mkdir -p {DATA} && cp --sparse=always {} {DATA}/disk.img && chown -R 107:107 {DATA}",
        image.display()
    ))?;
    let key = ctx.path("key");
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(&key)
        .status()
        .context("ssh-keygen")?;
    ensure!(made.success(), "ssh-keygen: {made}");
    let public = std::fs::read_to_string(key.with_extension("pub"))?;
    let [volume, claim] = local_volume(VM, "Filesystem", (DATA, "3Gi"), &c.node()?);
    c.apply(&[storage_class(), waiting(volume), waiting(claim)])?;
    ctx.part("a claim waits for its VM", || {
        // The controller binds other claims within this time.
        std::thread::sleep(Duration::from_secs(3));
        c.until("pvc", VM, ".status.phase", "Pending")?;
        c.apply(&[user_data(&public), debian()])?;
        c.until("pvc", VM, ".status.phase", "Bound")
    });
    let key = key.display().to_string();
    ctx.part("ssh", || ssh(c, &key));
    ctx.part("scp", || scp(ctx, c, &key));
    ctx.part("stop", || {
        c.virtctl(&["stop", VM])?.ok()?;
        c.until("vm", VM, ".status.printableStatus", "Stopped")
    });
    for (kind, name) in [
        ("vm", VM),
        ("secret", "debian-cloud-init"),
        ("pvc", VM),
        ("pv", VM),
        ("storageclass", CLASS),
    ] {
        c.delete(kind, name)?;
    }
    c.until_none(VMI)?;
    c.on_node(&format!("rm -r {DATA}"))?;
    c.delete("pod", "node-shell")?;
    c.until_none("pods")
}

/// Local volumes that are bound when the first pod is scheduled, so that both are on one node.
fn storage_class() -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    })
}

/// A volume or a claim of that class, without the name of the other.
fn waiting(mut object: Value) -> Value {
    object["spec"]["storageClassName"] = json!(CLASS);
    if let Some(spec) = object["spec"].as_object_mut() {
        spec.remove("volumeName");
    }
    object
}

/// cloud-init's user data in a Secret.
fn user_data(public_key: &str) -> Value {
    let data = format!("#cloud-config\nssh_authorized_keys:\n- {public_key}");
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "debian-cloud-init"},
        "stringData": {"userdata": data},
    })
}

fn debian() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": VM},
        "spec": {
            "runStrategy": "Always",
            "template": {
                "metadata": {"labels": {"husk.io/runtime": "true"}},
                "spec": {
                    "terminationGracePeriodSeconds": 120,
                    "domain": {
                        "memory": {"guest": "768Mi"},
                        "devices": {
                            "rng": {},
                            "disks": [
                                {"name": "root", "disk": {"bus": "virtio"}},
                                {"name": "cloud-init", "disk": {"bus": "virtio"}},
                            ],
                            "interfaces": [{"name": "default", "masquerade": {}}],
                        },
                    },
                    "networks": [{"name": "default", "pod": {}}],
                    "volumes": [
                        {"name": "root", "persistentVolumeClaim": {"claimName": VM}},
                        {"name": "cloud-init", "cloudInitNoCloud": {"secretRef": {"name": "debian-cloud-init"}}},
                    ],
                },
            },
        },
    })
}

/// `virtctl ssh` and `scp` run the machine's own OpenSSH client, through virt-api.
fn options(key: &str) -> [String; 3] {
    let option = |name: &str| format!("--local-ssh-opts=-o {name}");
    [
        format!("--identity-file={key}"),
        option("StrictHostKeyChecking=no"),
        option("UserKnownHostsFile=/dev/null"),
    ]
}

fn ssh(c: &KubeVirt<'_>, key: &str) -> Result<()> {
    c.until("vm", VM, ".status.printableStatus", "Running")?;
    let options = options(key);
    let target = format!("debian@vm/{VM}");
    let mut words = vec![
        "ssh",
        target.as_str(),
        "--command=hostname; cat /etc/debian_version",
    ];
    words.extend(options.iter().map(String::as_str));
    let deadline = Instant::now() + BOOT;
    loop {
        let said = c.virtctl(&words)?;
        if said.status == 0 {
            ensure!(
                said.text.contains(VM) && said.text.contains("13."),
                "hostname and version: {}",
                said.text
            );
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "no login: {}", said.text);
        std::thread::sleep(Duration::from_secs(5));
    }
}

fn scp(ctx: &TestContext, c: &KubeVirt<'_>, key: &str) -> Result<()> {
    let (there, back) = (ctx.path("there"), ctx.path("back"));
    let content: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(&there, &content)?;
    let remote = format!("debian@vm/{VM}:/home/debian/copy");
    let options = options(key);
    for (from, to) in [
        (there.display().to_string(), remote.clone()),
        (remote, back.display().to_string()),
    ] {
        let mut words = vec!["scp", from.as_str(), to.as_str()];
        words.extend(options.iter().map(String::as_str));
        c.virtctl(&words)?.ok()?;
    }
    ensure!(std::fs::read(&back)? == content, "the copy differs");
    Ok(())
}
