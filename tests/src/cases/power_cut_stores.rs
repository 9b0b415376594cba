//! Power cuts while objects and volumes change: the stores are consistent afterwards, and what was done is there.

use crate::harness::context::{CommandResult, TestContext};
use crate::harness::log_writes::LoggedDisk;
use crate::harness::registry::sh;
use crate::harness::stores::{self, STEPS, Stores};
use crate::harness::{Case, TIMEOUT};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "power-cut-stores",
    about: "dm-log-writes replayed at 100 moments of apply, import, clone, resize and delete: no object or volume is damaged or lost",
    limit: Duration::from_secs(3600),
    run,
};

const DISK_MIB: u64 = 96;
const LOG_MIB: u64 = 512;
/// Power cuts, spread over the writes.
const CUTS: usize = 100;

fn run(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    let web = stores::prepare(ctx)?;
    let mut disk = LoggedDisk::make(ctx, "stores", DISK_MIB, LOG_MIB)?;
    let mounted = ctx.path("mounted");
    disk.mount(&mounted)?;
    disk.mark("begin")?;
    for (number, step) in STEPS.iter().enumerate() {
        husk(ctx, &mounted, step.words)?
            .ok()
            .with_context(|| format!("{:?}", step.words))?;
        disk.mark(&number.to_string())?;
    }
    let log = disk.into_log()?;
    drop(web);
    let begin = log.position("begin")?;
    let ends: Vec<usize> = (0..STEPS.len())
        .map(|step| log.position(&step.to_string()))
        .collect::<Result<_>>()?;
    let last = ends.last().copied().unwrap_or(begin);
    ensure!(last - begin > CUTS, "only {} writes", last - begin);
    let cut = |number: usize| begin + (last - begin) * number / (CUTS - 1);
    ctx.part("power cuts", || {
        for number in 0..CUTS {
            let at = cut(number);
            let done = ends.iter().filter(|end| **end <= at).count();
            std::fs::write(ctx.path("cut.ext4"), log.disk_before(at)?)?;
            check(ctx, done)
                .with_context(|| format!("a power cut after {at} writes, {done} steps were done"))?;
        }
        Ok(())
    });
    Ok(())
}

/// A `husk` command whose data is below `folder`.
fn husk(ctx: &TestContext, folder: &Path, words: &[&str]) -> Result<CommandResult> {
    let mut command = ctx.husk(words);
    command.env("HUSK_DATA_DIR", folder.join("data"));
    ctx.finish(command, TIMEOUT)
}

/// Mounts the disk as a power cut left it after `done` steps, and checks the stores.
fn check(ctx: &TestContext, done: usize) -> Result<()> {
    let folder = ctx.path("cut");
    std::fs::create_dir_all(&folder)?;
    let (file, mount) = (ctx.path("cut.ext4"), folder.to_string_lossy().into_owned());
    sh(ctx, &format!("mount -o loop {} {mount}", file.display()))?;
    let stores = Stores {
        husk: &|words| husk(ctx, &folder, words),
        data: folder.join("data"),
    };
    let checked = stores.check(done);
    sh(ctx, &format!("umount {mount}"))?;
    checked
}
