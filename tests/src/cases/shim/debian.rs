//! A whole Debian from a containerDisk image, as published for KubeVirt.

use super::ctr::OWN;
use crate::harness::containerd::image::Image;
use crate::harness::containerd::{Containerd, Version};
use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::qemu_img::qemu_img;
use crate::harness::{Case, DEBIAN, images};
use anyhow::{Result, ensure};
use serde_json::json;

pub const CASE: Case = Case {
    name: "shim-debian",
    about: "ctr runs Debian from an image from scratch with a qcow2, or raw, in /disk: log in, write, power off",
    limit: DEBIAN,
    run,
};

fn run(ctx: &TestContext) -> Result<()> {
    let containerd = Containerd::start(ctx, Version::V1_7)?;
    let disk = images::disk("debian-13-cloud")?;
    ctx.part("qcow2", || {
        let qcow2 = ctx.path("disk.qcow2");
        let [from, to] = [&disk, &qcow2].map(|path| path.to_string_lossy());
        qemu_img(ctx, &["convert", "-O", "qcow2", &from, &to])?;
        let image = Image::new(ctx, "qcow2")?.file("/disk/debian.qcow2", &qcow2)?;
        std::fs::remove_file(&qcow2)?;
        image.import(&containerd, OWN)?;
        boots(&containerd, "qcow2")
    });
    ctx.part("raw", || {
        Image::new(ctx, "raw")?
            .file("/disk/debian.img", &disk)?
            .import(&containerd, OWN)?;
        boots(&containerd, "raw")
    });
    Ok(())
}

fn boots(c: &Containerd<'_>, image: &str) -> Result<()> {
    let manifest = Manifest::new("debian")
        .memory("512Mi")
        .disk("root", json!({"containerDisk": {"image": "any"}}))
        .cloud_init("#cloud-config\npassword: husk\nchpasswd: {expire: false}\nssh_pwauth: true\n");
    let session = c.on_terminal(&manifest, &[], image, image)?;
    let shell = Shell::log_in_on(&session, "debian", "husk")?;
    shell.ok("echo written > /var/tmp/here && sync")?;
    shell.send("systemctl poweroff")?;
    ensure!(
        session.wait(crate::harness::guest::TO_LOGIN)?.status == 0,
        "not a poweroff"
    );
    c.nothing_left()
}
