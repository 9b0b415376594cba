//! Snapshots of a VM with a disk that no reflink can copy. Without it, one can be restored once, if its source never
//! resumed; with a full copy, any number of times.

use super::{SAVE, text};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{TIMEOUT, images};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Size of the disk in bytes.
const SIZE: u64 = 8 << 20;
const MARK: &str = "dd if=/dev/vda bs=512 count=1 iflag=direct status=none | head -n 1";

pub fn run(ctx: &TestContext) -> Result<()> {
    // On another file system than the snapshot: no reflink is possible.
    let image = PathBuf::from(format!("/dev/shm/husk-snapshot-{}.img", std::process::id()));
    File::create(&image)?.set_len(SIZE)?;
    let done = all(ctx, &image);
    std::fs::remove_file(&image)?;
    done
}

fn all(ctx: &TestContext, image: &Path) -> Result<()> {
    once(ctx, image).context("once")?;
    copied(ctx, image, "image").context("a copy of an image")?;
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let device = ctx.host(&["losetup", "--find", "--show", &text(image)])?;
    let done = copied(ctx, Path::new(device.trim()), "device");
    ctx.host(&["losetup", "--detach", device.trim()])?;
    done.context("a copy of a block device")
}

fn manifest(image: &Path) -> Result<Manifest> {
    let manifest = Manifest::new("claim").claim("data", "data", image);
    Ok(manifest.small(&images::small("6.12")?, "disks,shell"))
}

/// Command that writes a mark to the disk.
fn write(mark: &str) -> String {
    format!("echo {mark} | dd of=/dev/vda bs=512 conv=sync,fsync status=none")
}

fn once(ctx: &TestContext, image: &Path) -> Result<()> {
    let vm = Vm::start(ctx, &manifest(image)?)?;
    let shell = Shell::small(&vm)?;
    shell.ok(&write("before"))?;
    let (first, second) = (text(&ctx.path("first")), text(&ctx.path("second")));
    let restore = |dir: &str| ctx.run_within(&["restore", dir], TIMEOUT);

    let refused = ctx.run(&["snapshot", "claim", &first, "--resume"])?.fails(1)?;
    expect_contains(&refused, &["\"data\"", "--resume"])?;
    ensure!(
        !ctx.path("first").exists(),
        "a refused snapshot leaves its directory"
    );
    ensure!(vm.inspect()?["paused"] == false, "the VM is paused");

    ctx.run_within(&["snapshot", "claim", &first], SAVE)?.ok()?;
    ensure!(vm.inspect()?["paused"] == true, "the VM runs");
    restore(&first)?.fails_with(1, &["claim"])?;
    ctx.run(&["resume", "claim"])?.ok()?;
    shell.ok(&write("after"))?;

    ctx.run_within(&["snapshot", "claim", &second], SAVE)?.ok()?;
    vm.discard()?;
    restore(&first)?.fails_with(1, &["resumed"])?;

    let vm = Vm::restore(ctx, &ctx.path("second"), "claim")?;
    let shell = Shell::going_on(vm.console())?;
    ensure!(shell.ok(MARK)? == "after");
    shell.ok(&write("restored"))?;
    vm.power_off(&shell)?;
    restore(&second)?.fails_with(1, &["restored"])?;
    ctx.nothing_left(Duration::from_secs(10))
}

/// With a full copy of the disk the VM goes on, and so do clones beside it.
fn copied(ctx: &TestContext, image: &Path, name: &str) -> Result<()> {
    let source = Vm::start(ctx, &manifest(image)?)?;
    let shell = Shell::small(&source)?;
    shell.ok(&write("saved"))?;
    let dir = ctx.path(&format!("copied-{name}"));
    let command = ["snapshot", "claim", &text(&dir), "--resume", "--copy-disks"];
    ctx.run_within(&command, SAVE)?.ok()?;
    ensure!(source.inspect()?["paused"] == false, "the VM is paused");
    let copy = dir.join("disk-data.img").metadata()?;
    ensure!(copy.len() == SIZE, "the copy has {} bytes", copy.len());
    ensure!(copy.blocks() * 512 < SIZE, "the copy has no holes");
    shell.ok(&write("source"))?;

    let names = ["one", "two"];
    let clones = names.map(|name| Vm::restore(ctx, &dir, name));
    let clones = clones.into_iter().collect::<Result<Vec<_>>>()?;
    for (clone, name) in clones.iter().zip(names) {
        let shell = Shell::going_on(clone.console())?;
        let found = shell.ok(MARK)?;
        ensure!(found == "saved", "{name} reads {found:?}");
        shell.ok(&write(name))?;
    }
    for (vm, mark) in clones.iter().chain([&source]).zip(["one", "two", "source"]) {
        let shell = Shell::going_on(vm.console())?;
        let found = shell.ok(MARK)?;
        ensure!(found == mark, "{mark} reads {found:?}");
        shell.send("poweroff -f")?;
        vm.run().wait(TIMEOUT)?.says(&["powered off"])?;
    }
    ensure!(
        std::fs::read(image)?.starts_with(b"source\n"),
        "a clone has written to the image of the claim"
    );
    ctx.nothing_left(Duration::from_secs(10))
}
