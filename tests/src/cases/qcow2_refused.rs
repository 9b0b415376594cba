//! qcow2 images that are refused because of their headers, and raw images whose format is never probed.

use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::qemu_img::qemu_img;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, images};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const REFUSED: Case = Case {
    name: "qcow2-refused",
    about: "qcow2 images that name other files, or are broken, are refused in one line with volume, file and reason",
    limit: SMALL,
    run: refused,
};

pub const RAW: Case = Case {
    name: "raw-stays-raw",
    about: "a qcow2 image on a raw volume, ephemeral or not, is what the guest reads, not what is believed",
    limit: SMALL,
    run: raw_stays_raw,
};

/// A qcow2 image that names the host's password file as its backing file.
fn thief(ctx: &TestContext) -> Result<PathBuf> {
    let path = ctx.path("thief.qcow2");
    let words = [
        "create",
        "-q",
        "-u",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        "/etc/passwd",
        "thief.qcow2",
        "8M",
    ];
    qemu_img(ctx, &words)?;
    Ok(path)
}

fn create(ctx: &TestContext, name: &str, options: &[&str]) -> Result<PathBuf> {
    let words = [&["create", "-q", "-f", "qcow2"], options, &[name, "8M"]].concat();
    qemu_img(ctx, &words)?;
    Ok(ctx.path(name))
}

fn refused(ctx: &TestContext) -> Result<()> {
    let edited = |name: &str, edit: &dyn Fn(&File) -> std::io::Result<()>| -> Result<PathBuf> {
        let path = create(ctx, name, &[])?;
        edit(&File::options().write(true).open(&path)?)?;
        Ok(path)
    };
    let backing = ["-u", "-F", "qcow2", "-b"];
    let cases: [(PathBuf, &str); 8] = [
        (thief(ctx)?, "qcow2: it names a backing file"),
        // A backing chain that contains a loop.
        (
            create(ctx, "loop.qcow2", &[&backing[..], &["./loop.qcow2"]].concat())?,
            "qcow2: it names a backing file",
        ),
        (
            create(ctx, "absent.qcow2", &[&backing[..], &["nowhere.qcow2"]].concat())?,
            "qcow2: it names a backing file",
        ),
        (
            create(ctx, "split.qcow2", &["-o", "data_file=split.raw"])?,
            "qcow2: its data is in another file",
        ),
        (
            edited("cut.qcow2", &|file| file.set_len(70_000))?,
            "qcow2: the L1 table at 0x",
        ),
        (
            edited("huge.qcow2", &|file| {
                file.write_all_at(&(1u64 << 62).to_be_bytes(), 24)
            })?,
            "qcow2: the L1 table has",
        ),
        (
            edited("corrupt.qcow2", &|file| {
                file.write_all_at(&2u64.to_be_bytes(), 72)
            })?,
            "qcow2: it is marked as corrupt",
        ),
        (ctx.path("missing.qcow2"), "No such file or directory"),
    ];
    for (path, reason) in cases {
        let name = path
            .file_stem()
            .context("no name")?
            .to_string_lossy()
            .into_owned();
        ctx.part(&name, || is_refused(ctx, &name, &path, reason));
    }
    Ok(())
}

fn is_refused(ctx: &TestContext, name: &str, path: &Path, reason: &str) -> Result<()> {
    let manifest = Manifest::new(name)
        .container_disk("root", path)
        .small(&images::small("6.12")?, "disks");
    let answer = ctx.run_within(&manifest.run_words(ctx)?, Duration::from_secs(60))?;
    let text = answer.fails(1)?;
    let wanted = format!("error: {name}: volume \"root\": {}: {reason}", path.display());
    expect_contains(&text, &[&wanted])?;
    let last = text.trim_end().lines().last();
    ensure!(
        last.is_some_and(|line| line.starts_with("error: ")),
        "more than one line:\n{text}"
    );
    ctx.nothing_left(Duration::from_secs(5))
}

fn raw_stays_raw(ctx: &TestContext) -> Result<()> {
    let image = thief(ctx)?;
    let bytes = std::fs::metadata(&image)?.len().next_multiple_of(4096);
    let volumes = ["claim", "host", "ephemeral"].map(|name| (name, ctx.path(&format!("{name}.img"))));
    for (_, path) in &volumes {
        std::fs::copy(&image, path)?;
        File::options().write(true).open(path)?.set_len(bytes)?;
    }
    let claim = json!({"claimName": "data"});
    let manifest = Manifest::new("raw")
        .disk("claim", json!({"persistentVolumeClaim": claim}))
        .volume("claim", &volumes[0].1)
        .disk(
            "host",
            json!({"hostDisk": {"path": volumes[1].1, "type": "Disk"}}),
        )
        .disk(
            "ephemeral",
            json!({"ephemeral": {"persistentVolumeClaim": claim}}),
        )
        .volume("ephemeral", &volumes[2].1)
        .small(&images::small("6.12")?, "disks,shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    for disk in ["vda", "vdb", "vdc"] {
        let size = shell.ok(&format!("cat /sys/block/{disk}/size"))?;
        ensure!(size == (bytes / 512).to_string(), "{disk} has {size} sectors");
        shell.expect_contains(&format!("head -c 3 /dev/{disk}"), &["QFI"])?;
        let passwords = format!("grep -c root:x /dev/{disk}");
        ensure!(
            shell.run(&passwords, Duration::from_secs(60))?.1 == "0",
            "{disk} shows the file it names"
        );
        shell.ok(&format!(
            "echo changed | dd of=/dev/{disk} bs=512 seek=1 conv=sync,fsync status=none"
        ))?;
    }
    vm.power_off(&shell)?;
    for ((name, path), changed) in volumes.iter().zip([true, true, false]) {
        let mut sector = [0; 7];
        File::open(path)?.read_exact_at(&mut sector, 512)?;
        ensure!((&sector == b"changed") == changed, "{name}: {sector:?}");
    }
    Ok(())
}
