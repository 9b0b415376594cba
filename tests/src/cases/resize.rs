//! An image that grows on the host.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, images};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;

pub const CASE: Case = Case {
    name: "resize",
    about: "a guest sees that its disk's image has grown on the host, without a reboot, and uses the new room",
    limit: SMALL,
    run,
};

const MIB: u64 = 1 << 20;

fn run(ctx: &TestContext) -> Result<()> {
    let path = ctx.path("claim.img");
    let image = File::options()
        .create_new(true)
        .read(true)
        .write(true)
        .open(&path)?;
    image.set_len(16 * MIB)?;
    let manifest = Manifest::new("grows")
        .claim("claim", "data", &path)
        .small(&images::small("6.12")?, "disks,shell");
    let vm = Vm::start(ctx, &manifest)?;
    vm.expect(r"husk-disk-vda: size=32768 ro=0")?;
    let shell = Shell::small(&vm)?;
    shell.ok("echo before > /dev/vda && sync")?;

    // Twice: the guest must notice later changes too.
    for mebibytes in [40, 100] {
        image.set_len(mebibytes * MIB)?;
        sees(&shell, mebibytes * MIB / 512)?;
        let last = mebibytes * MIB / 512 - 1;
        shell.ok(&format!(
            "printf 'the end of {mebibytes}' | dd of=/dev/vda bs=512 seek={last} conv=notrunc,fsync status=none"
        ))?;
        let mut end = [0; 512];
        image.read_exact_at(&mut end, last * 512)?;
        let wanted = format!("the end of {mebibytes}");
        ensure!(end.starts_with(wanted.as_bytes()), "not in the image: {wanted}");
    }
    shell.expect_contains("head -c 6 /dev/vda", &["before"])?;

    // Also after a reboot.
    shell.send("reboot -f")?;
    vm.expect(r"husk-disk-vda: size=204800 ro=0")?;
    let shell = Shell::small(&vm)?;
    vm.power_off(&shell)?;
    ensure!(
        image.metadata()?.len() == 100 * MIB,
        "the image has another size than it was given"
    );
    Ok(())
}

/// Waits until the guest's disk has `sectors` sectors.
fn sees(shell: &Shell<'_>, sectors: u64) -> Result<()> {
    let size = "$(cat /sys/block/vda/size)";
    let wait = format!(
        "i=0; while [ {size} != {sectors} ] && [ $i -lt 300 ]; do i=$((i + 1)); sleep 0.2; done; \
         echo {size}; [ {size} = {sectors} ]"
    );
    let seen = shell.ok(&wait).map(drop);
    seen.with_context(|| format!("a minute after its image the guest's disk has not {sectors} sectors"))
}
