//! Data that a guest has flushed survives a power cut at any moment.

use super::flushed::{BLOCK, content, place};
use crate::harness::context::TestContext;
use crate::harness::log_writes::LoggedDisk;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, images};
use anyhow::{Result, ensure};
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

pub const CASE: Case = Case {
    name: "power-cut",
    about: "dm-log-writes replayed at every flush: the blocks flushed until then are there, in each cache mode, also in a file",
    limit: SMALL,
    run,
};

/// The guest's disks: name, cache mode, and true if the image is a file in a filesystem instead of the device itself.
const DISKS: [(&str, &str, bool); 3] = [
    ("vda", "none", false),
    ("vdb", "writethrough", false),
    ("vdc", "writeback", true),
];

/// Rounds of one block for each disk.
const ROUNDS: u64 = 30;

const IMAGE_MIB: u64 = 8;
const DISK_MIB: u64 = 24;
const LOG_MIB: u64 = 256;

fn run(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    let mut disks = Vec::new();
    let mut manifest = Manifest::new("cut");
    for (index, (name, cache, file)) in DISKS.into_iter().enumerate() {
        let mut disk = LoggedDisk::make(ctx, name, DISK_MIB, LOG_MIB)?;
        let mut image = disk.path();
        if file {
            let folder = ctx.path(name);
            disk.mount(&folder)?;
            image = folder.join("disk.img");
            File::create(&image)?.set_len(IMAGE_MIB << 20)?;
        }
        manifest = manifest
            .claim(name, name, &image)
            .set(&format!("/domain/devices/disks/{index}/cache"), json!(cache));
        disks.push(disk);
    }
    let vm = Vm::start(ctx, &manifest.small(&images::small("6.12")?, "numbers"))?;
    for round in 0..ROUNDS {
        vm.console()
            .expect(&format!("husk-flushed: vdc {round}\n"), TIMEOUT)?;
        for disk in &disks {
            disk.mark(&round.to_string())?;
        }
    }
    vm.discard()?;
    for ((name, _, file), disk) in DISKS.into_iter().zip(disks) {
        let log = disk.into_log()?;
        ctx.part(name, || {
            for round in 0..ROUNDS {
                let mut cut = log.disk_at(&round.to_string())?;
                if file {
                    // Mounting replays the journal: once for all blocks so far is enough.
                    if round % 10 != 9 {
                        continue;
                    }
                    cut = image_in(ctx, &cut)?;
                }
                all_there(name, round, &cut)?;
            }
            Ok(())
        });
    }
    Ok(())
}

/// Checks that every block up to `round` is in the `image`.
fn all_there(disk: &str, round: u64, image: &[u8]) -> Result<()> {
    for number in 0..=round {
        let at = usize::try_from(place(number))?;
        ensure!(
            image[at..at + BLOCK] == content(disk, number),
            "block {number} was flushed and would be lost by a power cut at {round}"
        );
    }
    Ok(())
}

/// The image within the filesystem on `disk`, as it is after a power cut.
fn image_in(ctx: &TestContext, disk: &[u8]) -> Result<Vec<u8>> {
    let (file, folder) = (ctx.path("cut.ext4"), ctx.path("cut"));
    std::fs::write(&file, disk)?;
    std::fs::create_dir_all(&folder)?;
    host(
        ctx,
        &[
            "mount",
            "-o",
            "loop",
            &file.to_string_lossy(),
            &folder.to_string_lossy(),
        ],
    )?;
    let read = read(&folder.join("disk.img"));
    host(ctx, &["umount", &folder.to_string_lossy()])?;
    read
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let mut image = vec![0; usize::try_from(IMAGE_MIB << 20)?];
    File::open(path)?.read_exact_at(&mut image, 0)?;
    Ok(image)
}

fn host(ctx: &TestContext, words: &[&str]) -> Result<()> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    ctx.finish(command, TIMEOUT)?.ok()?;
    Ok(())
}
