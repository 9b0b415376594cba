//! Debian's docker-registry with TLS and passwords, filled by skopeo.

use super::context::TestContext;
use super::program::Session;
use super::{images, oci, until};
use crate::finish::finish;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::net::TcpStream;
use std::process::Command;

/// Host and port. The user is `user`, the password `secret`.
pub const ADDRESS: &str = "localhost:5443";
/// An image with a disk that begins with [`MARK`].
pub const DISK: &str = "localhost:5443/disks/data:1";
/// An image with the kernel and initrd of the small image.
pub const KERNEL: &str = "localhost:5443/kernels/small:6.12";
/// An image with a disk that boots the small image, which starts a shell.
pub const BOOT: &str = "localhost:5443/disks/boot:1";
/// Beginning of the disk of [`DISK`].
pub const MARK: &str = "husk-disk-of-a-registry";

/// Runs a shell script in the case's folder.
pub fn sh(ctx: &TestContext, script: &str) -> Result<String> {
    let mut shell = Command::new("sh");
    finish(shell.args(["-euc", script]).current_dir(ctx.path(".")))
}

/// Starts the registry with a certificate of its own.
pub fn start(ctx: &TestContext) -> Result<Session> {
    sh(
        ctx,
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout tls.key -out tls.crt -days 2 -subj /CN=localhost \
         -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE
         htpasswd -nbB user secret > htpasswd
         echo '{\"auths\": {\"localhost:5443\": {\"auth\": \"'$(printf user:secret | base64)'\"}}}' > auth.json",
    )?;
    let path = |name: &str| ctx.path(name).display().to_string();
    let configuration = json!({
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": path("registry")}},
        "http": {"addr": ADDRESS, "tls": {"certificate": path("tls.crt"), "key": path("tls.key")}},
        "auth": {"htpasswd": {"realm": "husk", "path": path("htpasswd")}},
    });
    std::fs::write(ctx.path("registry.yml"), configuration.to_string())?;
    let mut command = Command::new("docker-registry");
    command.arg("serve").arg(ctx.path("registry.yml"));
    let session = Session::piped(command, &ctx.log("registry.log"))?;
    until(|| Ok(TcpStream::connect(ADDRESS).is_ok())).context("the registry does not listen")?;
    Ok(session)
}

/// Pushes an image with a disk, and one with a kernel.
pub fn fill(ctx: &TestContext) -> Result<()> {
    let small = images::small("6.12")?.packed();
    let (disk, kernel) = (ctx.path("disk-image/disk"), ctx.path("kernel-image/boot"));
    std::fs::create_dir_all(&disk)?;
    std::fs::create_dir_all(&kernel)?;
    std::fs::write(disk.join("disk.img"), format!("{MARK}\n"))?;
    std::fs::File::options()
        .write(true)
        .open(disk.join("disk.img"))?
        .set_len(64 << 20)?;
    std::fs::copy(&small.kernel, kernel.join("vmlinuz"))?;
    std::fs::copy(&small.initrd, kernel.join("initrd"))?;
    push(ctx, "disk-image", DISK)?;
    push(ctx, "kernel-image", KERNEL)
}

/// Pushes the image [`BOOT`].
pub fn push_boot_disk(ctx: &TestContext) -> Result<()> {
    let small = images::small("6.12")?.packed();
    let (kernel, initrd) = (small.kernel.display(), small.initrd.display());
    sh(
        ctx,
        &format!(
            "mkdir -p boot-tree/boot/loader/entries boot-image/disk
             cp {kernel} boot-tree/boot/vmlinuz
             cp {initrd} boot-tree/boot/initrd
             printf 'linux /boot/vmlinuz\\ninitrd /boot/initrd\\noptions console=ttyS0 quiet husk.do=disks,button,shell\\n' \\
                 > boot-tree/boot/loader/entries/guest.conf
             mke2fs -q -t ext4 -d boot-tree boot-image/disk/disk.img 64M"
        ),
    )?;
    push(ctx, "boot-image", BOOT)
}

/// `firmware` of a VM that boots [`KERNEL`], whose `/init` runs `words`.
pub fn firmware(words: &str) -> Value {
    json!({"kernelBoot": {
        "kernelArgs": format!("console=ttyS0 quiet husk.do={words}"),
        "container": {"image": KERNEL, "kernelPath": "/boot/vmlinuz", "initrdPath": "/boot/initrd"},
    }})
}

/// Serves the case's folder `web` at `address` by HTTP.
pub fn serve_web(ctx: &TestContext, address: &str) -> Result<Session> {
    let mut command = Command::new("busybox");
    command.args(["httpd", "-f", "-p", address, "-h"]);
    command.arg(ctx.path("web"));
    Session::piped(command, &ctx.log("web.log"))
}

/// Pushes an image with the files in `folder`.
pub fn push(ctx: &TestContext, folder: &str, name: &str) -> Result<()> {
    let layout = format!("{folder}-layout");
    oci::layout(ctx, &layout, &ctx.path(folder))?;
    let push = format!(
        "skopeo copy --insecure-policy --dest-tls-verify=false --dest-creds user:secret oci:{layout} docker://{name}"
    );
    sh(ctx, &push).map(drop)
}
