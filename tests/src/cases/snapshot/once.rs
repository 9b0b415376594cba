//! A snapshot of a VM with a disk that does not travel along: it can be restored once, if its source never resumed.

use super::{SAVE, text};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{PATIENCE, images};
use anyhow::{Result, ensure};
use serde_json::json;
use std::fs::File;
use std::time::Duration;

const MARK: &str = "dd if=/dev/vda bs=512 count=1 iflag=direct status=none | head -n 1";

pub fn run(ctx: &TestContext) -> Result<()> {
    // On another file system than the snapshot: no reflink is possible.
    let image = std::path::PathBuf::from(format!("/dev/shm/husk-snapshot-{}.img", std::process::id()));
    File::create(&image)?.set_len(8 << 20)?;
    let done = once(ctx, &image);
    std::fs::remove_file(&image)?;
    done
}

fn once(ctx: &TestContext, image: &std::path::Path) -> Result<()> {
    let manifest = Manifest::new("claim")
        .device(
            "data",
            json!({"disk": {"bus": "virtio"}}),
            json!({"persistentVolumeClaim": {"claimName": "data"}}),
        )
        .volume("data", image)
        .small(&images::small("6.12")?, "disks,shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok("echo before | dd of=/dev/vda bs=512 conv=sync,fsync status=none")?;
    let (first, second) = (text(&ctx.path("first")), text(&ctx.path("second")));
    let restore = |dir: &str| ctx.finish(ctx.husk(&["restore", dir]), PATIENCE);

    let refused = ctx.run(&["snapshot", "claim", &first, "--resume"])?.fails(1)?;
    expect_contains(&refused, &["\"data\"", "--resume"])?;
    ensure!(
        !ctx.path("first").exists(),
        "a refused snapshot leaves its directory"
    );
    ensure!(vm.inspect()?["paused"] == false, "the VM is paused");

    ctx.finish(ctx.husk(&["snapshot", "claim", &first]), SAVE)?.ok()?;
    ensure!(vm.inspect()?["paused"] == true, "the VM runs");
    expect_contains(&restore(&first)?.fails(1)?, &["claim"])?;
    ctx.run(&["resume", "claim"])?.ok()?;
    shell.ok("echo after | dd of=/dev/vda bs=512 conv=sync,fsync status=none")?;

    ctx.finish(ctx.husk(&["snapshot", "claim", &second]), SAVE)?
        .ok()?;
    vm.discard()?;
    expect_contains(&restore(&first)?.fails(1)?, &["resumed"])?;

    let vm = Vm::restore(ctx, &ctx.path("second"), "claim")?;
    let shell = Shell::going_on(vm.console())?;
    ensure!(shell.ok(MARK)? == "after");
    shell.ok("echo restored | dd of=/dev/vda bs=512 conv=sync,fsync status=none")?;
    shell.send("poweroff -f")?;
    vm.powered_off()?;
    expect_contains(&restore(&second)?.fails(1)?, &["restored"])?;
    ctx.nothing_left(Duration::from_secs(10))
}
