//! A Debian cloud image from a claim, as a user would run it: cloud-init, `virtctl ssh` and `scp`, the guest agent.

use crate::finish::finish;
use crate::harness::context::TestContext;
use crate::harness::images;
use crate::harness::kubevirt::objects::local_volume;
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met, poll};
use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kubevirt-debian",
    about: "Debian from a claim that waits for its first consumer, with cloud-init from a Secret; virtctl ssh, scp; the guest agent, a password and new keys",
    limit: Duration::from_secs(1200),
    run,
};

const VM: &str = "debian";
/// Secrets with access credentials.
const KEYS: &str = "debian-keys";
const PASSWORDS: &str = "debian-passwords";
const PASSWORD: &str = "open sesame";
/// Storage class of the disk.
const CLASS: &str = "local-wait";
/// Folder of the disk on the node.
const DATA: &str = "/var/tmp/husk-debian";
/// Time limit from the VM's start until cloud-init has installed the key.
const BOOT: Duration = Duration::from_secs(600);

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    let image = images::disk("debian-13-cloud")?;
    // A controller that has not seen the class yet binds its claims at once.
    c.apply(&[storage_class()])?;
    c.on_node(&format!(
        "mkdir -p {DATA} && cp --sparse=always {} {DATA}/disk.img && chown -R 107:107 {DATA}",
        image.display()
    ))?;
    let (key, public) = new_key(ctx, "key")?;
    let [volume, claim] = local_volume(VM, "Filesystem", (DATA, "3Gi"), &c.node()?);
    c.apply(&[waiting(volume), waiting(claim)])?;
    ctx.part("a claim waits for its VM", || {
        // The controller binds other claims within this time.
        std::thread::sleep(Duration::from_secs(3));
        c.until("pvc", VM, ".status.phase", "Pending")?;
        c.apply(&[
            user_data(&public),
            secret(KEYS, "key", &public),
            secret(PASSWORDS, "root", PASSWORD),
            debian(),
        ])?;
        c.until("pvc", VM, ".status.phase", "Bound")
    });
    ctx.part("ssh", || ssh(c, &key));
    ctx.part("scp", || scp(ctx, c, &key));
    ctx.part("guest agent", || guest_agent(c));
    ctx.part("access credentials", || access_credentials(ctx, c, &key));
    ctx.part("stop", || {
        c.virtctl(&["stop", VM])?.ok()?;
        c.until("vm", VM, ".status.printableStatus", "Stopped")
    });
    c.delete_all(&[
        ("vm", VM),
        ("secret", "debian-cloud-init"),
        ("secret", KEYS),
        ("secret", PASSWORDS),
        ("pvc", VM),
        ("pv", VM),
        ("storageclass", CLASS),
    ])?;
    c.until_none(VMI)?;
    c.on_node(&format!("rm -r {DATA}"))?;
    c.delete("pod", "node-shell")?;
    c.until_none("pods")
}

/// A new key: its path, and its public part.
fn new_key(ctx: &TestContext, name: &str) -> Result<(String, String)> {
    let key = ctx.path(name);
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]);
    finish(keygen.arg(&key))?;
    let public = std::fs::read_to_string(key.with_extension("pub"))?;
    Ok((key.display().to_string(), public))
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

fn secret(name: &str, key: &str, value: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {key: value}})
}

fn debian() -> Value {
    let from = |secret: &str| json!({"secret": {"secretName": secret}});
    let keys = json!({"qemuGuestAgent": {"users": ["debian"]}});
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
                    "accessCredentials": [
                        {"sshPublicKey": {"source": from(KEYS), "propagationMethod": keys}},
                        {"userPassword": {"source": from(PASSWORDS), "propagationMethod": {"qemuGuestAgent": {}}}},
                    ],
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
    let said = poll(BOOT, Duration::from_secs(5), || {
        let (status, said) = run_by_ssh(c, key, "hostname; cat /etc/debian_version")?;
        Ok(match status {
            0 => Ok(said),
            _ => Err(format!("no login: {said}")),
        })
    })?;
    ensure!(
        said.contains(VM) && said.contains("13."),
        "hostname and version: {said}"
    );
    Ok(())
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

/// The VMI and virtctl show the answers of Debian's own agent.
fn guest_agent(c: &KubeVirt<'_>) -> Result<()> {
    c.until_condition(VMI, VM, "AgentConnected", "True")?;
    c.until(VMI, VM, ".status.guestOSInfo.name", "Debian GNU/Linux")?;
    c.until(VMI, VM, ".status.guestOSInfo.versionId", "13")?;
    let info: Value = serde_json::from_str(&c.virtctl(&["guestosinfo", VM])?.ok()?)?;
    ensure!(info["hostname"] == VM && info["os"]["id"] == "debian", "{info}");
    c.until_true("the root file system is not listed", || {
        let listed = c.virtctl(&["fslist", VM])?.ok()?;
        let list: Value = serde_json::from_str(&listed)?;
        let mut items = list["items"].as_array().into_iter().flatten();
        let root = items.find(|item| item["mountPoint"] == "/");
        let told =
            root.is_some_and(|root| root["totalBytes"].as_i64() > Some(1 << 30) && root["disk"].is_array());
        met(told, || listed)
    })
}

/// Runs a command in the guest; its exit status and output.
fn run_by_ssh(c: &KubeVirt<'_>, key: &str, command: &str) -> Result<(i32, String)> {
    let (target, command) = (format!("debian@vm/{VM}"), format!("--command={command}"));
    let options = options(key);
    let mut words = vec!["ssh", target.as_str(), command.as_str()];
    words.extend(options.iter().map(String::as_str));
    let done = c.virtctl(&words)?;
    Ok((done.status, done.text))
}

/// A password of a Secret is set, and a key that is added to a Secret is accepted.
fn access_credentials(ctx: &TestContext, c: &KubeVirt<'_>, key: &str) -> Result<()> {
    c.until_condition(VMI, VM, "AccessCredentialsSynchronized", "True")?;
    let (status, said) = run_by_ssh(c, key, &format!("echo '{PASSWORD}' | su root -c 'id -u'"))?;
    ensure!(
        status == 0 && said.contains('0'),
        "the password of root: {status} {said}"
    );
    let (second, public) = new_key(ctx, "second-key")?;
    c.apply(&[secret(KEYS, "key", &public)])?;
    c.until_true("the new key is not accepted", || {
        let (status, said) = run_by_ssh(c, &second, "hostname")?;
        met(status == 0, || said)
    })?;
    let (status, _) = run_by_ssh(c, key, "hostname")?;
    ensure!(status != 0, "the old key is still accepted");
    Ok(())
}
