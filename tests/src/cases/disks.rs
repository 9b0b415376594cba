//! Disks other than the boot disk.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::privileges;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, images};
use anyhow::{Result, ensure};
use serde_json::json;
use std::os::unix::fs::FileExt;

pub const CASE: Case = Case {
    name: "disks",
    about: "emptyDisk, hostDisk, containerDisk and a claim: sizes, serial numbers, who keeps what is written",
    limit: SMALL,
    run,
};

fn run(ctx: &TestContext) -> Result<()> {
    let host = ctx.path("host.img");
    let claim = ctx.path("claim.img");
    let image = ctx.path("image.img");
    for (path, text) in [(&claim, "from the claim"), (&image, "from the image")] {
        let file = std::fs::File::create(path)?;
        file.set_len(8 << 20)?;
        file.write_all_at(text.as_bytes(), 0)?;
    }
    let manifest = Manifest::new("disks")
        .empty_disk("empty", "64Mi")
        .disk(
            "host",
            json!({"hostDisk": {"path": host, "type": "DiskOrCreate", "capacity": "32Mi"}}),
        )
        .claim("claim", "data", &claim)
        .container_disk("image", &image)
        .set("/domain/devices/disks/2/serial", json!("claim-serial"))
        .small(&images::small("6.12")?, "disks,shell");
    let vm = Vm::start(ctx, &manifest)?;
    // In sectors of 512 bytes.
    vm.expect(r"husk-disk-vda: size=131072 ro=0")?;
    vm.expect(r"husk-disk-vdb: size=65536 ro=0")?;
    vm.expect(r"husk-disk-vdc: size=16384 ro=0 serial=claim-serial\n")?;
    vm.expect(r"husk-disk-vdd: size=16384 ro=0")?;
    let shell = Shell::small(&vm)?;
    shell.expect_contains("head -c 14 /dev/vdc", &["from the claim"])?;
    shell.expect_contains("head -c 14 /dev/vdd", &["from the image"])?;
    shell.ok("test $(head -c 4096 /dev/vda | tr -d '\\0' | wc -c) = 0")?;
    // The last sector is there, and nothing after it.
    shell.ok("dd if=/dev/vdb of=/dev/null bs=512 skip=65535 2>/dev/null")?;
    for disk in ["vda", "vdb", "vdc", "vdd"] {
        shell.ok(&format!("echo changed by the guest > /dev/{disk}"))?;
    }
    shell.ok("sync")?;
    ctx.part("confinement", || {
        // The control thread, the machine's, the vCPU, the SCSI controller and four disks.
        let threads = privileges::confined(vm.pid("vmmPid")?)?;
        ensure!(threads >= 8, "only {threads} threads");
        Ok(())
    });
    vm.power_off(&shell)?;

    let begins = |path, text: &str| -> Result<bool> {
        let bytes = std::fs::read(path)?;
        Ok(bytes.starts_with(text.as_bytes()))
    };
    ensure!(
        begins(&host, "changed by the guest")?,
        "hostDisk lost what was written"
    );
    ensure!(
        begins(&claim, "changed by the guest")?,
        "the claim lost what was written"
    );
    ensure!(
        begins(&image, "from the image")?,
        "the containerDisk's image was changed"
    );
    ensure!(
        std::fs::metadata(&host)?.len() == 32 << 20,
        "hostDisk has another size"
    );
    Ok(())
}
