//! Snapshots of running guests.

mod kills;
mod live;
mod network;
mod once;
mod refused;
mod replug;
pub mod rounds;
mod states;

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, images};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use kills::KILLS;
pub use live::LIVE;
pub use network::NETWORK;
pub use replug::REPLUG;
pub use states::STATES;

pub const CLONES: Case = Case {
    name: "snapshot-clones",
    about: "a guest under load is saved and goes on, as two clones do: fio's checksums, the clock, a reseeded kernel",
    limit: Duration::from_secs(900),
    run: clones,
};

pub const ONCE: Case = Case {
    name: "snapshot-once",
    about: "a snapshot without all disks is restored once, and not after its VM has gone on; one with a full copy is cloned",
    limit: Duration::from_secs(720),
    run: once::run,
};

pub const PLAIN: Case = Case {
    name: "snapshot",
    about: "a guest is saved and goes on in another process; a snapshot that is cut off, damaged or of another version is refused",
    limit: Duration::from_secs(480),
    run: refused::run,
};

/// Time limit of a snapshot in a busy lab.
const SAVE: Duration = Duration::from_secs(240);

/// A guest's load: each disk is written and verified by fio until `/tmp/stop` exists, and a log of the uptime grows. It
/// runs in subshells, whose ends the shell does not report.
const LOAD: &str = r#"mkdir -p /tmp && cd /tmp && rm -f stop ended.* bad.*; dmesg | wc -l > lines
((while [ ! -e stop ]; do read up _ < /proc/uptime; echo $up >> ticks; sleep 0.2; done; touch ended.ticks) &)
for disk in DISKS; do ((
    while [ ! -e stop ]; do
        fio --eta=never --thread --name=$disk --filename=/dev/$disk --size=2m --rw=randrw --rwmixread=30 --ioengine=libaio \
            --direct=1 --iodepth=16 --fsync=32 --bssplit=4k/50:16k/30:64k/20 --verify=crc32c --verify_fatal=1 \
            --verify_state_save=0 --randseed=SEED > out.$disk 2>&1 || { cp out.$disk bad.$disk; break; }
    done; touch ended.$disk) &)
done"#;

/// Starts the load on `disks`.
fn load(shell: &Shell<'_>, disks: &[&str], seed: u64) -> Result<()> {
    let script = LOAD.replace("DISKS", &disks.join(" "));
    shell.ok(&script.replace("SEED", &seed.to_string()))?;
    // Each disk has requests in flight now.
    for disk in disks {
        shell.ok(&format!(
            "n=0; until [ $(awk '{{print $5}}' /sys/block/{disk}/stat) -gt 0 ]; do n=$((n+1)); [ $n -lt 300 ] || exit 1; \
             sleep 0.1; done"
        ))?;
    }
    Ok(())
}

/// Ends the load, and checks that fio found no wrong data, that the clock did not go back, and that the kernel has nothing
/// to complain about.
fn check_load(shell: &Shell<'_>, disks: &[&str]) -> Result<()> {
    let ended: Vec<_> = disks.iter().map(|disk| format!("-e ended.{disk}")).collect();
    let wait = format!(
        "touch stop; until [ {} -a -e ended.ticks ]; do sleep 0.1; done",
        ended.join(" -a ")
    );
    shell.ok_within(&wait, SAVE).context("the load does not end")?;
    let bad = shell.ok("cat bad.* 2>/dev/null || true")?;
    ensure!(bad.is_empty(), "fio found wrong data:\n{bad}");
    let ticks = shell.ok("cat ticks")?;
    let ticks = ticks.split_whitespace().map(str::parse);
    let ticks: Vec<f64> = ticks.collect::<Result<_, _>>().context("ticks")?;
    let back = ticks.windows(2).find(|pair| pair[1] < pair[0]);
    ensure!(back.is_none(), "the uptime went back: {back:?}");
    let complaints = "BUG|soft lockup|rcu.*stall|hung task|I/O error|needs reset|clocksource.*unstable";
    let (status, text) = shell.run(
        &format!("dmesg | tail -n +$(($(cat lines) + 1)) | grep -E '{complaints}'"),
        TIMEOUT,
    )?;
    ensure!(status == 1, "the kernel complains:\n{text}");
    Ok(())
}

/// Uptime of a guest in seconds.
fn uptime(shell: &Shell<'_>) -> Result<f64> {
    let text = shell.ok("cat /proc/uptime")?;
    let uptime = text.split_whitespace().next().context("no uptime")?;
    Ok(uptime.parse()?)
}

/// A container image with one raw disk of 32 MiB.
fn container(ctx: &TestContext) -> Result<PathBuf> {
    let folder = ctx.path("image").join("disk");
    std::fs::create_dir_all(&folder)?;
    let image = folder.join("disk.img");
    std::fs::File::create(&image)?.set_len(32 << 20)?;
    Ok(image)
}

/// The guest of the case: a scratch disk on virtio-blk (vda), an overlay on virtio-scsi (sda), two vCPUs.
fn manifest(ctx: &TestContext, name: &str) -> Result<Manifest> {
    let image = container(ctx)?;
    Ok(Manifest::new(name)
        .cpu(1, 2, 1)
        .memory("256Mi")
        .set("/domain/devices/blockMultiQueue", json!(true))
        .empty_disk("scratch", "32Mi")
        .container_disk_as("root", json!({"disk": {"bus": "scsi"}}), &image)
        .small(&images::small("6.12-disks")?, "disks,scsi,shell"))
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn clones(ctx: &TestContext) -> Result<()> {
    let disks = ["vda", "sda"];
    let seed = super::fio::seed()?;
    println!("fio's seed: {seed}");
    let source = Vm::start(ctx, &manifest(ctx, "source")?)?;
    let shell = Shell::small(&source)?;
    shell.ok(
        "dmesg -n 1; echo of the source | dd of=/dev/sda bs=512 seek=60000 conv=sync,fsync status=none",
    )?;
    load(&shell, &disks, seed)?;
    let dir = ctx.path("snapshot");
    let before = uptime(&shell)?;
    let begun = Instant::now();
    let snapshot = ["snapshot", "source", &text(&dir), "--resume"];
    ctx.run_within(&snapshot, SAVE)?.ok()?;
    let saving = begun.elapsed();
    check_load(&shell, &disks).context("the source")?;
    source.discard()?;
    // Longer than the tolerance below.
    std::thread::sleep(2 * saving);

    let restoring = Instant::now();
    let names = ["one", "two"];
    let clones = names.map(|name| Vm::restore(ctx, &dir, name));
    let clones = clones.into_iter().collect::<Result<Vec<_>>>()?;
    for (clone, name) in clones.iter().zip(names) {
        let shell = Shell::going_on(clone.console())?;
        check_load(&shell, &disks).context(name)?;
        // The guest's time passes only while it runs: before its pause, and from the restore on.
        let passed = uptime(&shell)? - before;
        let limit = (saving + restoring.elapsed()).as_secs_f64();
        ensure!(
            (0.0..limit).contains(&passed),
            "{name}: {passed} s instead of at most {limit} s passed"
        );
        shell.expect_contains("dmesg", &["crng reseeded due to virtual machine fork"])?;
        shell.expect_contains(
            "dd if=/dev/sda bs=512 skip=60000 count=1 status=none",
            &["of the source"],
        )?;
        for disk in disks {
            shell.ok(&format!(
                "echo written by {name} | dd of=/dev/{disk} bs=512 seek=60001 conv=sync,fsync status=none"
            ))?;
        }
    }
    for (clone, name) in clones.iter().zip(names) {
        let shell = Shell::going_on(clone.console())?;
        for disk in disks {
            let read =
                format!("dd if=/dev/{disk} bs=512 skip=60001 count=1 iflag=direct status=none | head -n 1");
            let found = shell.ok(&read)?;
            ensure!(
                found == format!("written by {name}"),
                "{name} reads {found:?} on {disk}"
            );
        }
        // A restored machine boots again as any other.
        shell.send("reboot -f")?;
        let shell = Shell::small(clone)?;
        shell.send("poweroff -f")?;
        clone.run().wait(TIMEOUT)?.says(&["powered off"])?;
    }
    ctx.nothing_left(Duration::from_secs(10))?;
    let left = std::fs::read_dir(ctx.path("scratch"))?.count();
    ensure!(left == 0, "{left} files are left in the scratch directory");
    Ok(())
}
