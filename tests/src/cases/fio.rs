//! Checks that fio reads back in the guest the data that it wrote.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, images};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub const CASE: Case = Case {
    name: "fio-verify",
    about: "fio's checksums over reads, writes and flushes of many sizes, on a disk of two queues; HUSK_FIO_SEED repeats",
    limit: Duration::from_secs(480),
    run,
};

/// Time limit of one fio in a busy lab.
const FIO: Duration = Duration::from_secs(180);

/// Options of every fio: a checksum for every block, and a status other than 0 on a mismatch.
const VERIFY: &str =
    "fio --thread --filename=/dev/vda --verify=crc32c --verify_fatal=1 --verify_state_save=0";

fn run(ctx: &TestContext) -> Result<()> {
    let seed = seed()?;
    println!("fio's seed: {seed}");
    let manifest = Manifest::new("verify")
        .cpu(1, 2, 1)
        .memory("512Mi")
        .set("/domain/devices/blockMultiQueue", json!(true))
        .empty_disk("data", "64Mi")
        .small(&images::small("6.12-disks")?, "disks,shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok("mkdir -p /tmp && cd /tmp")?;
    ctx.part("control", || control(&shell));
    for engine in ["libaio", "io_uring"] {
        ctx.part(engine, || {
            let sizes = "512/10:4k/40:12k/10:64k/30:256k/10";
            fio(
                &shell,
                &format!(
                    "--name=mixed --ioengine={engine} --direct=1 --iodepth=16 --size=24m --rw=randrw \
                     --rwmixread=30 --bssplit={sizes} --fsync=64 --randseed={seed}"
                ),
            )
        });
    }
    // Through the guest's page cache, then read back from the disk with another pattern of requests.
    ctx.part("cached", || {
        let job = format!("--name=cached --ioengine=psync --bs=4k --size=8m --randseed={seed}");
        fio(
            &shell,
            &format!("{job} --rw=randwrite --do_verify=0 --end_fsync=1"),
        )?;
        shell.ok("echo 3 > /proc/sys/vm/drop_caches")?;
        fio(&shell, &format!("{job} --rw=read"))
    });
    // Discarded blocks, and only those, read as zeroes.
    ctx.part("discard", || {
        let job = "--name=kept --ioengine=libaio --direct=1 --bs=64k --size=4m";
        fio(&shell, &format!("{job} --offset=4m --rw=write --do_verify=0"))?;
        shell.ok("blkdiscard -o 8388608 -l 8388608 /dev/vda && blkdiscard -o 0 -l 4194304 /dev/vda")?;
        fio(&shell, &format!("{job} --offset=4m --rw=read"))?;
        for skip in [0, 2] {
            let zeroes = format!(
                "dd if=/dev/vda bs=4M skip={skip} count=1 iflag=direct status=none | tr -d '\\0' | wc -c"
            );
            let other = shell.ok(&zeroes)?;
            ensure!(
                other == "0",
                "{other} bytes of what was discarded are not zero: {zeroes}"
            );
        }
        Ok(())
    });
    vm.power_off(&shell)
}

/// Checks that fio does detect wrong data.
fn control(shell: &Shell<'_>) -> Result<()> {
    let job = "--name=control --ioengine=libaio --direct=1 --bs=4k --size=1m";
    fio(shell, &format!("{job} --rw=write --do_verify=0"))?;
    fio(shell, &format!("{job} --rw=read"))?;
    shell.ok("dd if=/dev/zero of=/dev/vda bs=512 seek=1001 count=1 conv=notrunc,fsync status=none")?;
    let (status, text) = shell.run(&format!("{VERIFY} {job} --rw=read"), FIO)?;
    ensure!(status != 0, "fio does not see a block that is wrong:\n{text}");
    Ok(())
}

fn fio(shell: &Shell<'_>, job: &str) -> Result<()> {
    shell.ok_within(&format!("{VERIFY} {job}"), FIO).map(drop)
}

/// A new seed in each run, so that the suite does not always test the same order.
pub fn seed() -> Result<u64> {
    match std::env::var("HUSK_FIO_SEED") {
        Ok(text) => text.parse().context("HUSK_FIO_SEED is not a number"),
        Err(_) => Ok(u64::from(
            SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos(),
        )),
    }
}
