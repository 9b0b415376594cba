//! Volumes of the machine: made, used, grown while a VM runs, copied and removed.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, images, met, poll};
use anyhow::{Result, ensure};
use std::path::PathBuf;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "volumes",
    about: "husk volume: a VM's data is kept, grows while it runs, and is copied",
    limit: SMALL,
    run,
};

/// Time for the guest to see a new size.
const GROWTH: Duration = Duration::from_secs(20);

fn husk(ctx: &TestContext, words: &[&str]) -> Result<String> {
    ctx.run(words)?.ok()
}

fn start<'s>(ctx: &'s TestContext, name: &str, volume: &str) -> Result<Vm<'s>> {
    let path = PathBuf::from(husk(ctx, &["volume", "path", volume])?.trim_end());
    let manifest = Manifest::new(name)
        .claim("root", "root", &path)
        .small(&images::small("6.12")?, "disks,shell");
    Vm::start(ctx, &manifest)
}

fn run(ctx: &TestContext) -> Result<()> {
    husk(ctx, &["volume", "create", "data", "--size", "8Mi"])?;
    ctx.run(&["volume", "create", "data", "--size", "8Mi"])?
        .fails_with(1, &["there is a volume data already"])?;

    let vm = start(ctx, "one", "data")?;
    let shell = Shell::small(&vm)?;
    shell.ok("echo kept | dd of=/dev/vda bs=512 seek=9 conv=sync,fsync status=none")?;
    let listed = ctx.json(&["volume", "list", "-o", "json"])?;
    ensure!(
        listed[0]["inUse"] == true && listed[0]["sizeBytes"] == 8 << 20,
        "{listed}"
    );
    for words in [
        &["volume", "rm", "data"][..],
        &["volume", "clone", "data", "copy"],
    ] {
        ctx.run(words)?
            .fails_with(1, &["a running VM uses the volume data"])?;
    }
    husk(ctx, &["volume", "resize", "data", "16Mi"])?;
    poll(GROWTH, Duration::from_secs(1), || {
        let size = shell.ok("cat /sys/block/vda/size")?;
        met(size == "32768", || {
            "the guest does not see the new size".to_owned()
        })
    })?;
    vm.power_off(&shell)?;
    ctx.run(&["volume", "resize", "data", "8Mi"])?
        .fails_with(1, &["cannot shrink to 8388608"])?;

    husk(ctx, &["volume", "clone", "data", "test/copy"])?;
    ensure!(
        husk(ctx, &["volume", "list", "-o", "name"])? == "data\ntest/copy\n",
        "the copy is not listed"
    );
    husk(ctx, &["volume", "rm", "data"])?;
    let vm = start(ctx, "two", "test/copy")?;
    let shell = Shell::small(&vm)?;
    let kept = shell.ok("dd if=/dev/vda bs=512 skip=9 count=1 status=none | head -n 1")?;
    ensure!(kept == "kept", "{kept}");
    vm.power_off(&shell)?;
    husk(ctx, &["volume", "rm", "test/copy"])?;
    ctx.run(&["volume", "path", "test/copy"])?
        .fails_with(1, &["no volume test/copy"])?;
    Ok(())
}
