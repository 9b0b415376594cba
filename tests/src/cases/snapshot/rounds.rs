//! Many snapshots of guests under load, each restored, with other kernels, numbers of vCPUs and devices. Not part of
//! the tests: `cargo xtask soak`.

use super::{SAVE, check_load, load, text};
use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, images};
use anyhow::{Context, Result};
use serde_json::json;
use std::path::Path;
use std::time::Duration;

pub const ON_5_10: Case = Case {
    name: "snapshot-rounds-5.10",
    about: "a guest under load is saved and restored again and again, with 1, 2 and 4 vCPUs and each disk; HUSK_FIO_SEED repeats",
    limit: Duration::from_secs(2 * 3600),
    run: |ctx| run(ctx, "5.10-disks"),
};

pub const ON_6_1: Case = Case {
    name: "snapshot-rounds-6.1",
    about: "the same with kernel 6.1",
    run: |ctx| run(ctx, "6.1-disks"),
    ..ON_5_10
};

pub const ON_6_12: Case = Case {
    name: "snapshot-rounds-6.12",
    about: "the same with kernel 6.12",
    run: |ctx| run(ctx, "6.12-disks"),
    ..ON_5_10
};

pub const ON_TESTING: Case = Case {
    name: "snapshot-rounds-testing",
    about: "the same with the kernel of Debian testing",
    run: |ctx| run(ctx, "testing-disks"),
    ..ON_5_10
};

/// Snapshots of a guest, each restored. Every other one is live.
const EACH: u32 = 6;
const VCPUS: [u32; 3] = [1, 2, 4];

fn run(ctx: &TestContext, kernel: &str) -> Result<()> {
    let first = crate::cases::fio::seed()?;
    println!("fio's seed: {first}");
    let image = super::container(ctx)?;
    let mut done = 0;
    for vcpus in VCPUS {
        for disk in ["blk", "scsi", "qcow2"] {
            let seed = first.wrapping_add(u64::from(done));
            let name = format!("{vcpus} vCPUs, {disk}, seed {seed}");
            ctx.part(&name, || rounds(ctx, (kernel, vcpus, disk), &image, seed));
            done += EACH;
        }
    }
    println!("{done} snapshots were restored");
    Ok(())
}

fn rounds(
    ctx: &TestContext,
    (kernel, vcpus, disk): (&str, u32, &str),
    image: &Path,
    seed: u64,
) -> Result<()> {
    // A part that fails leaves its VM.
    let name = format!("rounds-{vcpus}-{disk}");
    // Debian 12's fio has 90 MB of libraries.
    let manifest = Manifest::new(&name).cpu(1, vcpus, 1).memory("384Mi");
    let manifest = match disk {
        "blk" => manifest.empty_disk("data", "32Mi"),
        "scsi" => manifest.empty_disk_as("data", json!({"disk": {"bus": "scsi"}}), "32Mi"),
        _ => manifest.container_disk("data", image),
    };
    let manifest = manifest.small(&images::small(kernel)?, "disks,scsi,shell");
    let disks = [if disk == "scsi" { "sda" } else { "vda" }];
    let mut vm = Vm::start(ctx, &manifest)?;
    Shell::small(&vm)?.ok("dmesg -n 1")?;
    for round in 0..EACH {
        load(&Shell::going_on(vm.console())?, &disks, seed + u64::from(round))?;
        let dir = ctx.path(&name);
        let directory = text(&dir);
        let mut words = vec!["snapshot", &name, &directory];
        words.extend((round % 2 == 1).then_some("--live"));
        ctx.run_within(&words, SAVE)?.ok()?;
        vm.discard()?;
        vm = Vm::restore(ctx, &dir, &name)?;
        let shell = Shell::going_on(vm.console())?;
        check_load(&shell, &disks).with_context(|| format!("round {round}"))?;
        shell.ok("rm -f ticks")?;
        std::fs::remove_dir_all(&dir)?;
    }
    vm.discard()
}
