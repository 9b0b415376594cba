//! A kernel upgrade inside the guest: the next reboot boots the new kernel.

use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::{Shell, TO_LOGIN};
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, DEBIAN, images};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kernel-upgrade",
    about: "Debian 12 by its grub.cfg on an MBR disk; dpkg -i of Debian's next kernel, then reboot; husk stop",
    limit: DEBIAN,
    run,
};

/// Time limit of dpkg, which makes an initrd.
const UPGRADE: Duration = Duration::from_secs(400);

fn run(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("upgrade")
        .cpu(1, 2, 1)
        .memory("1Gi")
        .set("/terminationGracePeriodSeconds", json!(120))
        .container_disk("root", &images::disk("debian-12-cloud")?)
        .cloud_init("#cloud-config\npassword: secret\nchpasswd: {expire: false}\nruncmd:\n- echo first >> /var/log/first-boot\n");
    let vm = Vm::start(ctx, &manifest)?;
    vm.console().expect(r"Linux version 6\.1\.", TO_LOGIN)?;
    let shell = Shell::log_in(&vm, "debian", "secret")?;
    let old = shell.ok("uname -r")?;
    let new = shell.ok("dpkg-deb -f /root/linux-image-*.deb Package")?;
    let new = new
        .strip_prefix("linux-image-")
        .context("no kernel package in /root")?;
    ensure!(new != old, "the kernel in /root is the one that runs: {old}");
    ctx.part("booted from", || {
        let seen = vm.inspect()?;
        expect_contains(
            seen["bootedFrom"].as_str().context("nothing")?,
            &["/boot/grub/grub.cfg"],
        )
    });

    // A small initrd for this machine only, which is faster to make.
    shell.ok("echo MODULES=dep > /etc/initramfs-tools/conf.d/small")?;
    shell.ok_within("dpkg -i /root/linux-image-*.deb", UPGRADE)?;
    shell.send("reboot")?;

    vm.console()
        .expect(&format!("Linux version {} ", regex::escape(new)), TO_LOGIN)?;
    let shell = Shell::log_in(&vm, "debian", "secret")?;
    ensure!(shell.ok("uname -r")? == new, "another kernel runs");
    ctx.part("after reboot", || {
        let times = shell.ok("grep -c first /var/log/first-boot")?;
        ensure!(times == "1", "cloud-init's command ran {times} times");
        ensure!(vm.inspect()?["reboots"] == 1, "inspect does not say so");
        Ok(())
    });
    ctx.run_within(&["stop", "upgrade"], Duration::from_secs(150))?
        .ok()?;
    vm.powered_off()
}
