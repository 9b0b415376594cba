//! Twenty gibibytes and a million requests of every kind of disk, each read back and compared. Not part of the tests:
//! `cargo xtask soak`.

use super::fio::seed;
use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::qemu_img::{is_sound, keep, overlay, qemu_img};
use crate::harness::vm::Vm;
use crate::harness::{Case, images};
use anyhow::{Context, Result};
use regex::Regex;
use serde_json::json;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

pub const RAW: Case = Case {
    name: "soak-raw",
    about: "20 GiB and a million verified requests to a file on virtio-blk; HUSK_FIO_SEED repeats",
    limit: LIMIT,
    run: raw,
};

pub const BLOCK: Case = Case {
    name: "soak-block",
    about: "the same to a block device on virtio-scsi",
    limit: LIMIT,
    run: block,
};

pub const QCOW2: Case = Case {
    name: "soak-qcow2",
    about: "the same to an overlay over a qcow2 image; qemu-img finds both sound",
    limit: LIMIT,
    run: qcow2,
};

const LIMIT: Duration = Duration::from_secs(90 * 60);

/// Bytes that one fio of a round writes and reads.
const SIZE_MIB: u64 = 2048;
const REQUESTS: u64 = 1_000_000;
const BYTES: u64 = 20 << 30;

fn raw(ctx: &TestContext) -> Result<()> {
    let image = ctx.path("raw.img");
    File::create(&image)?.set_len(SIZE_MIB << 20)?;
    soak(ctx, "virtio", &image)
}

fn block(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    let image = ctx.path("block.img");
    File::create(&image)?.set_len(SIZE_MIB << 20)?;
    let image = image.display().to_string();
    let device = ctx.host(&["losetup", "--find", "--show", "--direct-io=on", &image])?;
    let device = device.trim();
    let done = soak(ctx, "scsi", Path::new(device));
    ctx.host(&["losetup", "--detach", device])?;
    done
}

fn soak(ctx: &TestContext, bus: &str, image: &Path) -> Result<()> {
    let manifest = Manifest::new("soak")
        .memory("512Mi")
        .device(
            "data",
            json!({"disk": {"bus": bus}}),
            json!({"persistentVolumeClaim": {"claimName": "data"}}),
        )
        .volume("data", image);
    rounds(ctx, manifest, bus, |_| Ok(()))
}

fn qcow2(ctx: &TestContext) -> Result<()> {
    let folder = ctx.path("image").join("disk");
    std::fs::create_dir_all(&folder)?;
    let image = folder.join("disk.qcow2");
    let (path, size) = (image.to_string_lossy(), format!("{SIZE_MIB}M"));
    qemu_img(ctx, &["create", "-q", "-f", "qcow2", &path, &size])?;
    let manifest = Manifest::new("soak")
        .memory("512Mi")
        .container_disk("data", &ctx.path("image"));
    let overlay = rounds(ctx, manifest, "virtio", overlay)?;
    is_sound(ctx, &keep(ctx, overlay, "overlay.qcow2")?)?;
    is_sound(ctx, &image)
}

/// Runs rounds of fio on the only disk of the manifest's guest until there are enough; returns the result of `held`,
/// which gets the VM.
fn rounds<T>(
    ctx: &TestContext,
    manifest: Manifest,
    bus: &str,
    held: impl FnOnce(&Vm<'_>) -> Result<T>,
) -> Result<T> {
    let first = seed()?;
    println!("fio's seed: {first}");
    let manifest = manifest.small(&images::small("6.12-disks")?, "disks,scsi,shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok("dmesg -n 1; mkdir -p /tmp && cd /tmp")?;
    let disk = if bus == "virtio" { "vda" } else { "sda" };
    let (mut requests, mut bytes, mut round) = (0, 0_u64, 0);
    while requests < REQUESTS || bytes < BYTES {
        let seed = first.wrapping_add(round);
        let command = format!(
            "fio --eta=never --thread --name=round --filename=/dev/{disk} --size={SIZE_MIB}m --rw=randrw --rwmixread=20 \
             --ioengine=libaio --direct=1 --iodepth=32 --fsync=512 --bssplit=4k/40:12k/10:16k/20:64k/20:256k/10 \
             --verify=crc32c --verify_fatal=1 --verify_state_save=0 --randseed={seed}"
        );
        let text = shell
            .ok_within(&command, LIMIT)
            .with_context(|| format!("round {round}"))?;
        requests += written(&text)?;
        // fio reads all that it has written once more, and compares it.
        let sectors = shell.ok(&format!("echo $(awk '{{print $7}}' /sys/block/{disk}/stat)"))?;
        bytes = sectors.parse::<u64>()? * 512;
        round += 1;
        println!(
            "round {round}: {requests} requests, {} MiB written, read and compared",
            bytes >> 20
        );
    }
    shell.ok("! dmesg | grep -E 'I/O error|scsi.*(abort|timing out|offline)'")?;
    let held = held(&vm)?;
    vm.power_off(&shell)?;
    Ok(held)
}

/// Number of writes that fio issued: `issued rwts: total=14512,58222,0,0 short=…`.
fn written(text: &str) -> Result<u64> {
    let line = Regex::new(r"issued rwts: total=\d+,(\d+),")?;
    let found = line
        .captures(text)
        .with_context(|| format!("not what fio says: {text}"))?;
    Ok(found[1].parse()?)
}
