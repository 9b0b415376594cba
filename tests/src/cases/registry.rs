//! Images from a registry: Debian's docker-registry with TLS and passwords, filled by skopeo.

use crate::harness::context::{CommandResult, TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::program::Session;
use crate::harness::registry::{self, ADDRESS, DISK, KERNEL, MARK, sh};
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "registry",
    about: "husk run pulls a containerDisk and a kernel from a registry with TLS and passwords; a second VM reads nothing again",
    limit: Duration::from_secs(480),
    run,
};

/// Allocated size that a second VM may cost beside its overlay.
const SECOND: u64 = 16 << 20;

fn run(ctx: &TestContext) -> Result<()> {
    let registry = registry::start(ctx)?;
    registry::fill(ctx)?;
    ctx.part("refusals", || refusals(ctx));
    ctx.part("full disk", || full_disk(ctx));
    ctx.part("VMs", || vms(ctx, registry));
    ctx.part("removal", || removal(ctx));
    Ok(())
}

/// A `husk` command of a user with the folder `home`, whose credentials are `login` if they have logged in.
fn husk(ctx: &TestContext, words: &[&str], home: &str, login: bool) -> Command {
    let mut command = ctx.husk(words);
    let auth = if login { "auth.json" } else { "none.json" };
    command
        .env("HOME", ctx.path(home))
        .env("REGISTRY_AUTH_FILE", ctx.path(auth));
    command
}

fn pull(ctx: &TestContext, image: &str, home: &str, login: bool) -> Result<CommandResult> {
    ctx.finish(husk(ctx, &["images", "pull", image], home, login), TIMEOUT)
}

/// Each is one line that names the remedy, and leaves nothing.
fn refusals(ctx: &TestContext) -> Result<()> {
    let trusted = ctx.path("home/.config/containers/certs.d").join(ADDRESS);
    let distrusted = ctx.path("stranger/.config/containers/certs.d").join(ADDRESS);
    std::fs::create_dir_all(&trusted)?;
    std::fs::create_dir_all(&distrusted)?;
    std::fs::copy(ctx.path("tls.crt"), trusted.join("ca.crt"))?;
    sh(
        ctx,
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout other.key -out other.crt -days 2 -subj /CN=other",
    )?;
    std::fs::copy(ctx.path("other.crt"), distrusted.join("ca.crt"))?;
    for (image, home, login, text) in [
        (
            DISK,
            "nobody",
            true,
            "asked by plain HTTP: certs.d has no directory for localhost:5443",
        ),
        (
            DISK,
            "stranger",
            true,
            "the certificate of localhost:5443 is not trusted",
        ),
        (DISK, "home", false, "log in with `podman login localhost:5443`"),
        (
            "localhost:5443/disks/none:1",
            "home",
            true,
            "localhost:5443 has no such image",
        ),
        (
            KERNEL,
            "home",
            true,
            "it has no file in folder /disk: it is not a containerDisk",
        ),
    ] {
        let refused = pull(ctx, image, home, login)?.fails(1)?;
        expect_contains(&refused, &[text])?;
        let errors = refused.lines().filter(|line| line.starts_with("error: "));
        ensure!(errors.count() == 1, "{refused}");
    }
    ctx.run(&["images", "list"])?
        .says(&["no image is in the store"])?;
    ctx.run(&["images", "prune"])?.says(&["0 removed"])?;
    Ok(())
}

/// An image that does not fit on the disk is not begun.
fn full_disk(ctx: &TestContext) -> Result<()> {
    const IMAGE: &str = "localhost:5443/disks/random:1";
    sh(
        ctx,
        "mkdir -p small random-image/disk; mount -t tmpfs -o size=32M none small
         head -c 64M /dev/urandom > random-image/disk/disk.img",
    )?;
    let refused = || -> Result<()> {
        registry::push(ctx, "random-image", IMAGE)?;
        let mut command = husk(ctx, &["images", "pull", IMAGE], "home", true);
        command.env("HUSK_DATA_DIR", ctx.path("small"));
        let refused = ctx.finish(command, TIMEOUT)?.fails(1)?;
        expect_contains(&refused, &["the image needs", "free space, or set HUSK_DATA_DIR"])?;
        let errors = refused.lines().filter(|line| line.starts_with("error: "));
        ensure!(errors.count() == 1, "{refused}");
        let left = allocated(&ctx.path("small"))?;
        ensure!(left < 1 << 20, "{left} bytes are left");
        Ok(())
    };
    let done = refused();
    sh(ctx, "umount small")?;
    done
}

/// A VM whose kernel and disk are in the registry.
fn manifest(name: &str) -> Manifest {
    Manifest::new(name)
        .disk("root", json!({"containerDisk": {"image": DISK}}))
        .set("/domain/firmware", registry::firmware("disks,shell"))
}

fn start_vm<'s>(ctx: &'s TestContext, name: &str, login: bool) -> Result<Vm<'s>> {
    let words = manifest(name).run_words(ctx)?;
    let words: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
    let run = Session::piped(
        husk(ctx, &words, "home", login),
        &ctx.log(&format!("{name}.run.log")),
    )?;
    run.expect(&format!(r"(?m)^{name}: running"), TIMEOUT)
        .with_context(|| format!("{name} does not run"))?;
    Vm::attach(ctx, name.to_owned(), run)
}

fn vms(ctx: &TestContext, registry: Session) -> Result<()> {
    let one = start_vm(ctx, "one", true)?;
    let shell = Shell::small(&one)?;
    shell.expect_contains("head -n 1 /dev/vda", &[MARK])?;
    shell.ok("echo changed | dd of=/dev/vda conv=fsync status=none")?;
    let before = allocated(&ctx.path("data"))?;

    // Without the registry: what the store has is not asked for.
    drop(registry);
    let two = start_vm(ctx, "two", false)?;
    let other = Shell::small(&two)?;
    other.expect_contains("head -n 1 /dev/vda", &[MARK])?;
    let cost = allocated(&ctx.path("data"))?.saturating_sub(before);
    ensure!(cost <= SECOND, "the second VM costs {cost} bytes");
    ctx.run(&["images", "list"])?.says(&[DISK, KERNEL])?;
    ctx.run(&["images", "rm", DISK])?
        .fails_with(1, &["a running VM uses localhost:5443/disks/data:1"])?;
    for shell in [&shell, &other] {
        shell.send("poweroff -f")?;
    }
    for vm in [&one, &two] {
        vm.run().wait(TIMEOUT)?.says(&["powered off"])?;
    }
    ctx.nothing_left(Duration::from_secs(10))
}

fn removal(ctx: &TestContext) -> Result<()> {
    ctx.run(&["images", "rm", DISK, KERNEL])?.ok()?;
    let left = sh(ctx, "find data -type f -not -name .lock")?;
    ensure!(left.is_empty(), "left: {left}");
    ctx.run(&["images", "rm", DISK])?
        .fails_with(1, &["no image localhost:5443/disks/data:1 in the store"])?;
    Ok(())
}

/// Allocated bytes of the files below a folder.
fn allocated(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += match metadata.is_dir() {
            true => allocated(&entry.path())?,
            false => metadata.blocks() * 512,
        };
    }
    Ok(bytes)
}
