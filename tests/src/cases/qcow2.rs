//! qcow2 container disks, and overlays over images that a VM must not change.

use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::qemu_img::{content, is_sound, keep, overlay, qemu_img};
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, images, oci};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

pub const SHARED: Case = Case {
    name: "qcow2-shared",
    about: "one qcow2 containerDisk for two VMs at once: each has its own overlay, the image stays as it is",
    limit: Duration::from_secs(480),
    run: shared,
};

pub const VERIFY: Case = Case {
    name: "qcow2-fio",
    about: "fio's checksums on overlays on both controllers; qemu-img finds overlay and image sound and equal to the guest's view",
    limit: Duration::from_secs(600),
    run: verify,
};

/// Time limit of one fio in a busy lab.
const FIO: Duration = Duration::from_secs(180);

const MIB: u64 = 1 << 20;
/// Sectors of the images.
const SECTORS: u64 = 48 * MIB / 512;

/// Makes `disk/disk.qcow2` in the folder `name`, the content of a container image. Every fourth MiB holds text, the
/// first compressed where `compressed`.
fn container(ctx: &TestContext, name: &str, compressed: bool) -> Result<PathBuf> {
    let raw = ctx.path("content.raw");
    let file = File::create(&raw)?;
    file.set_len(SECTORS * 512)?;
    for at in (0..SECTORS * 512).step_by(4 * MIB as usize) {
        let text = format!("husk-base {name} {at}\n");
        let text: Vec<u8> = text.bytes().cycle().take(MIB as usize).collect();
        file.write_all_at(&text, at)?;
    }
    let folder = ctx.path(name).join("disk");
    std::fs::create_dir_all(&folder)?;
    let image = folder.join("disk.qcow2");
    let mut words = vec!["convert", "-f", "raw", "-O", "qcow2"];
    if compressed {
        words.push("-c");
    }
    let (raw, to) = (raw.display().to_string(), image.display().to_string());
    words.extend([&raw[..], &to]);
    qemu_img(ctx, &words)?;
    Ok(image)
}

/// Both VMs have the same two disks: from a directory, and from an OCI layout.
fn shared(ctx: &TestContext) -> Result<()> {
    let image = container(ctx, "image", true)?;
    let layout = oci::layout(ctx, "layout", &ctx.path("image"))?;
    let before = std::fs::read(&image)?;
    let manifest = |name| -> Result<Manifest> {
        Ok(Manifest::new(name)
            .container_disk("root", &ctx.path("image"))
            .container_disk("packed", &layout)
            .small(&images::small("6.12")?, "disks,shell"))
    };
    let names = ["one", "two"];
    let vms = names
        .iter()
        .map(|name| Vm::start(ctx, &manifest(name)?))
        .collect::<Result<Vec<_>>>()?;
    let mut shells = Vec::new();
    for (vm, name) in vms.iter().zip(names) {
        vm.expect(&format!(r"husk-disk-vda: size={SECTORS} ro=0"))?;
        vm.expect(&format!(r"husk-disk-vdb: size={SECTORS} ro=0"))?;
        let shell = Shell::small(vm)?;
        for disk in ["vda", "vdb"] {
            shell.expect_contains(&format!("head -c 17 /dev/{disk}"), &["husk-base image 0"])?;
            // Write where the image has data, and where it has none.
            for sector in [1, 20_000] {
                shell.ok(&format!(
                    "echo written by {name} | dd of=/dev/{disk} bs=512 seek={sector} conv=sync,fsync status=none"
                ))?;
            }
        }
        shells.push(shell);
    }
    // A writer of the image must wait.
    let writer = Manifest::new("writer")
        .claim("root", "root", &image)
        .small(&images::small("6.12")?, "disks");
    let refused = ctx.run_within(&writer.run_words(ctx)?, TIMEOUT)?;
    refused.fails_with(1, &["volume \"root\":", "is in use"])?;
    for (shell, name) in shells.iter().zip(names) {
        shell.ok("echo 3 > /proc/sys/vm/drop_caches")?;
        for (disk, sector) in [("vda", 1), ("vda", 20_000), ("vdb", 1), ("vdb", 20_000)] {
            let read = format!("dd if=/dev/{disk} bs=512 skip={sector} count=1 status=none | head -n 1");
            ensure!(
                shell.ok(&read)? == format!("written by {name}"),
                "{name} has not what it wrote to {disk}"
            );
        }
        shell.send("poweroff -f")?;
    }
    for vm in &vms {
        let answer = vm.run().wait(TIMEOUT)?;
        answer.says(&["powered off"])?;
    }
    ctx.nothing_left(Duration::from_secs(10))?;
    ensure!(
        std::fs::read(&image)? == before,
        "the containerDisk's image was changed"
    );
    is_sound(ctx, &image)?;
    ensure!(
        std::fs::read_dir(ctx.path("scratch"))?.next().is_none(),
        "something is left in the scratch directory"
    );

    let vm = Vm::start(ctx, &manifest("one")?)?;
    let shell = Shell::small(&vm)?;
    for disk in ["vda", "vdb"] {
        let sector = shell.ok(&format!("dd if=/dev/{disk} bs=512 skip=1 count=1 status=none"))?;
        ensure!(
            !sector.contains("written by"),
            "{disk} kept what another VM wrote"
        );
        expect_contains(&sector, &["husk-base image 0"])?;
        let zeroes = format!("dd if=/dev/{disk} bs=512 skip=20000 count=1 status=none | tr -d '\\0' | wc -c");
        ensure!(shell.ok(&zeroes)? == "0", "{disk} kept what another VM wrote");
    }
    vm.power_off(&shell)
}

fn verify(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    let seed = super::fio::seed()?;
    println!("fio's seed: {seed}");
    for (bus, disk, words) in [
        ("virtio", "vda", "disks,shell"),
        ("scsi", "sda", "disks,scsi,shell"),
    ] {
        ctx.part(bus, || verify_on(ctx, bus, disk, words, seed));
    }
    Ok(())
}

fn verify_on(ctx: &TestContext, bus: &str, disk: &str, words: &str, seed: u64) -> Result<()> {
    let image = container(ctx, bus, bus == "scsi")?;
    let before = std::fs::read(&image)?;
    let manifest = Manifest::new(bus)
        .cpu(1, 2, 1)
        .memory("512Mi")
        .set("/domain/devices/blockMultiQueue", json!(true))
        .container_disk_as("root", json!({"disk": {"bus": bus}}), &image)
        .small(&images::small("6.12-disks")?, words);
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    let overlay = overlay(&vm)?;
    shell.ok("mkdir -p /tmp && cd /tmp")?;
    let fio = |job: &str| -> Result<()> {
        let line = format!(
            "fio --thread --filename=/dev/{disk} --verify=crc32c --verify_fatal=1 --verify_state_save=0 \
             --randseed={seed} {job}"
        );
        shell.ok_within(&line, FIO).map(drop)
    };
    let sizes = "512/10:4k/40:12k/10:64k/30:256k/10";
    fio(&format!(
        "--name=mixed --ioengine=libaio --direct=1 --iodepth=16 --size=32m --rw=randrw --rwmixread=30 \
         --bssplit={sizes} --fsync=64"
    ))?;
    fio("--name=cached --ioengine=psync --bs=4k --offset=34m --size=6m --rw=randwrite --end_fsync=1")?;
    shell.ok(&format!("blkdiscard -o 8388608 -l 4194304 /dev/{disk}"))?;
    // Without any flush, the data is in the image because the VM ends cleanly.
    shell.ok(&format!(
        "echo the last | dd of=/dev/{disk} bs=512 seek={} oflag=direct conv=sync status=none",
        SECTORS - 1
    ))?;
    shell.ok("echo 3 > /proc/sys/vm/drop_caches")?;
    let seen = shell.ok(&format!("sha256sum < /dev/{disk}"))?;
    vm.power_off(&shell)?;

    let overlay = keep(ctx, overlay, &format!("{bus}-overlay.qcow2"))?;
    is_sound(ctx, &overlay)?;
    is_sound(ctx, &image)?;
    ensure!(
        std::fs::read(&image)? == before,
        "the containerDisk's image was changed"
    );
    let shown = content(ctx, &overlay, &image, &format!("{bus}-shown.raw"))?;
    let sum = Command::new("sha256sum").arg(&shown).output()?.stdout;
    let sum = String::from_utf8_lossy(&sum);
    let seen = seen.split_whitespace().next().context("no checksum")?;
    ensure!(
        sum.starts_with(seen),
        "qemu-img sees another content than the guest: {sum}, not {seen}"
    );
    Ok(())
}
