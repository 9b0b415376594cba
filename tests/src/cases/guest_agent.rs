//! The QEMU guest agent in a guest, by `husk guest`.

use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::registry::sh;
use crate::harness::vm::Vm;
use crate::harness::{Case, images, until};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "guest-agent",
    about: "qemu-ga of Debian: what it tells, commands, a frozen file system that copies clean, keys of a Secret, the clock, a power-off, and an agent that goes, floods and comes back",
    limit: Duration::from_secs(420),
    run,
};

const NAME: &str = "agent";
pub const FIRST_KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA first";
pub const SECOND_KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAB second";

fn run(ctx: &TestContext) -> Result<()> {
    let image = ctx.path("data.img");
    sh(ctx, &format!("mke2fs -q -t ext4 {} 32M", image.display()))?;
    let keys = ctx.path("keys");
    std::fs::create_dir(&keys)?;
    std::fs::write(keys.join("first"), FIRST_KEY)?;
    let manifest = Manifest::new(NAME)
        .claim("data", "data", &image)
        .volume("keys-access-cred", &keys)
        .set(
            "accessCredentials",
            json!([{"sshPublicKey": {
                "source": {"secret": {"secretName": "keys"}},
                "propagationMethod": {"qemuGuestAgent": {"users": ["root"]}},
            }}]),
        )
        .small(&images::small("6.12-agent")?, "disks,agent,shell");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect("husk-ports: org.qemu.guest_agent.0")?;
    let shell = Shell::small(&vm)?;
    shell.ok("mkdir /mnt && mount -t ext4 /dev/vda /mnt")?;
    ctx.part("what it tells", || tells(ctx, &shell));
    ctx.part("commands", || commands(ctx));
    ctx.part("public keys", || public_keys(&keys, &shell));
    ctx.part("the clock", || clock(ctx, &shell));
    ctx.part("freeze", || freeze(ctx, &shell));
    ctx.part("a forgotten thaw", || forgotten(ctx, &shell));
    ctx.part("an agent that goes and comes back", || gone_and_back(ctx, &shell));
    ctx.part("reset", || reset(ctx, &vm));
    power_off(&vm)
}

fn told(ctx: &TestContext) -> Result<Value> {
    ctx.json(&["guest", "info", NAME, "-o", "json"])
}

/// Waits until the agent tells something.
fn until_told(ctx: &TestContext, is: impl Fn(&Value) -> bool) -> Result<()> {
    until(|| {
        let shown = ctx.run(&["guest", "info", NAME, "-o", "json"])?;
        Ok(shown.status == 0 && serde_json::from_str(&shown.text).is_ok_and(|value| is(&value)))
    })
}

fn tells(ctx: &TestContext, shell: &Shell<'_>) -> Result<()> {
    until_told(ctx, |value| {
        value["os"]["kernelRelease"] != "" && value["fsFreezeStatus"] == "thawed"
    })?;
    let told = told(ctx)?;
    let release = shell.ok("uname -r")?;
    ensure!(
        release.contains(told["os"]["kernelRelease"].as_str().unwrap_or("?")),
        "{told}; {release}"
    );
    ensure!(
        told["connected"] == true && told["missingCommands"] == json!([]),
        "{told}"
    );
    let lo = &told["interfaces"][0];
    ensure!(lo["interfaceName"] == "lo", "{told}");
    ctx.run(&["guest", "info", NAME])?.says(&["Agent", "Kernel"])?;
    ctx.run(&["guest", "users", NAME])?.says(&["USER"])?;
    ctx.run(&["guest", "fs", NAME])?.says(&["MOUNTPOINT"])
}

fn commands(ctx: &TestContext) -> Result<()> {
    let exec = |words: &[&str]| ctx.run(&[&["guest", "exec", NAME, "--"], words].concat());
    let text = exec(&["/bin/busybox", "echo", "said in the guest"])?.ok()?;
    ensure!(text == "said in the guest\n", "{text:?}");
    exec(&["/bin/busybox", "sh", "-c", "exit 5"])?.fails(5)?;
    exec(&["/bin/busybox", "sh", "-c", "kill -9 $$"])?.fails(137)?;
    exec(&["/bin/none"])?.fails_with(1, &["guest-exec failed in the guest"])?;
    let long = ctx.run(&[
        "guest",
        "exec",
        NAME,
        "--timeout",
        "2",
        "--",
        "/bin/busybox",
        "sleep",
        "60",
    ])?;
    long.fails_with(1, &["did not end within 2s"])?;
    let large = exec(&["/bin/busybox", "sh", "-c", "yes husk | head -c 2000000"])?.ok()?;
    ensure!(large.len() == 2_000_000, "{} bytes", large.len());
    Ok(())
}

/// A copy of a frozen disk needs no replay of its journal and has what was written.
fn freeze(ctx: &TestContext, shell: &Shell<'_>) -> Result<()> {
    shell.ok("echo acknowledged > /mnt/file")?;
    shell.send("while echo more >> /mnt/more; do :; done &")?;
    shell.ok("until [ -s /mnt/more ]; do :; done")?;
    ctx.run(&["guest", "freeze", NAME])?
        .says(&["frozen; thawed in "])?;
    ctx.run(&["guest", "freeze", NAME])?
        .says(&["frozen already; thawed in "])?;
    let size = || shell.ok("cat /mnt/more | wc -c");
    ensure!(size()? == size()?, "the file grows while it is frozen");
    ensure!(told(ctx)?["fsFreezeStatus"] == "frozen", "{}", told(ctx)?);
    sh(ctx, "cp data.img copy.img")?;
    ctx.run(&["guest", "thaw", NAME])?.says(&["thawed"])?;
    ctx.run(&["guest", "thaw", NAME])?
        .fails_with(1, &["were thawed already"])?;
    let checked = sh(ctx, "e2fsck -fn copy.img; debugfs -R 'cat /file' copy.img")?;
    expect_contains(&checked, &["acknowledged"])?;
    let clean = sh(ctx, "dumpe2fs -h copy.img")?;
    ensure!(!clean.contains("needs_recovery"), "the journal needs a replay");
    // The guest goes on.
    shell.ok("kill %1; echo after > /mnt/after && sync").map(drop)
}

fn forgotten(ctx: &TestContext, shell: &Shell<'_>) -> Result<()> {
    ctx.run(&["guest", "freeze", NAME, "--thaw-after", "10"])?.ok()?;
    let left = told(ctx)?["thawSeconds"].as_u64();
    ensure!(left.is_some_and(|left| left <= 10), "{left:?}");
    until_told(ctx, |value| value["fsFreezeStatus"] == "thawed").context("it stays frozen")?;
    shell.ok("echo again > /mnt/again && sync").map(drop)
}

fn gone_and_back(ctx: &TestContext, shell: &Shell<'_>) -> Result<()> {
    const PORT: &str = "/dev/virtio-ports/org.qemu.guest_agent.0";
    const START: &str = "qemu-ga --daemonize --pidfile /run/qemu-ga.pid --statedir /run";
    shell.ok("kill $(cat /run/qemu-ga.pid); while [ -e /run/qemu-ga.pid ]; do sleep 0.1; done")?;
    until(|| {
        let shown = ctx.run(&["guest", "info", NAME])?;
        Ok(shown.text.contains("no longer connected"))
    })?;
    ctx.run(&["guest", "thaw", NAME])?
        .fails_with(1, &["no guest agent is connected"])?;
    // Another program floods the port, with a line of 10 MiB among it, and reads nothing.
    shell.ok(&format!(
        "{{ head -c 300000 /dev/urandom; head -c 10485760 /dev/zero; echo; }} > {PORT}"
    ))?;
    shell.ok(START)?;
    until_told(ctx, |value| value["connected"] == true)?;
    until(|| {
        Ok(ctx
            .run(&["guest", "exec", NAME, "--", "/bin/busybox", "true"])?
            .status
            == 0)
    })
    .context("no command after garbage")?;
    // An agent that is killed while file systems are frozen: the next one thaws them.
    ctx.run(&["guest", "freeze", NAME, "--thaw-after", "2"])?.ok()?;
    shell.ok("kill -9 $(cat /run/qemu-ga.pid); rm /run/qemu-ga.pid")?;
    std::thread::sleep(Duration::from_secs(3));
    shell.ok(START)?;
    until_told(ctx, |value| {
        value["connected"] == true && value["fsFreezeStatus"] == "thawed" && value["thawSeconds"].is_null()
    })?;
    shell.ok("echo thawed > /mnt/thawed && sync").map(drop)
}

/// After a reset the port is announced again.
fn reset(ctx: &TestContext, vm: &Vm<'_>) -> Result<()> {
    ctx.run(&["reset", NAME])?.ok()?;
    vm.expect("husk-ports: org.qemu.guest_agent.0")?;
    until_told(ctx, |value| {
        value["connected"] == true && value["os"]["kernelRelease"] != ""
    })
}

/// Keys of a Secret's directory, which gets another one while the VM runs.
fn public_keys(secret: &Path, shell: &Shell<'_>) -> Result<()> {
    let has = |key: &str| {
        until(|| {
            let keys = shell.ok("cat /root/.ssh/authorized_keys || true")?;
            Ok(keys.contains(key))
        })
        .with_context(|| format!("no key {key}"))
    };
    // The account was not there when the agent connected.
    shell.ok("mkdir -p /etc /root && echo root:x:0:0::/root:/bin/sh > /etc/passwd")?;
    has(FIRST_KEY)?;
    std::fs::write(secret.join("second"), SECOND_KEY)?;
    has(SECOND_KEY)
}

/// The clock of a VM that was paused is set.
fn clock(ctx: &TestContext, shell: &Shell<'_>) -> Result<()> {
    shell.ok("date -s '2001-02-03 04:05'")?;
    ctx.run(&["pause", NAME])?.ok()?;
    ctx.run(&["resume", NAME])?.ok()?;
    until(|| Ok(!shell.ok("date +%Y")?.contains("2001"))).context("the clock is late")
}

/// The guest has nothing that reacts to the power button, but its agent does.
fn power_off(vm: &Vm<'_>) -> Result<()> {
    let shell = Shell::small(vm)?;
    let program = "#!/bin/busybox sh\\n/bin/busybox poweroff -f\\n";
    shell.ok(&format!(
        "mkdir -p /sbin && printf '{program}' > /sbin/shutdown && chmod 755 /sbin/shutdown"
    ))?;
    vm.ctx().run(&["stop", NAME])?.ok()?;
    vm.powered_off()
}
