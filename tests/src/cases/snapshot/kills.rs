//! `husk`, monitor and VMM killed at any moment of a save and of a restore. Not part of the tests: `cargo xtask soak`.

use super::{SAVE, text};
use crate::cases::fio::seed;
use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::processes::{self, descendants};
use crate::harness::program::Session;
use crate::harness::vm::Vm;
use crate::harness::{Case, TIMEOUT, images, until};
use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use rustix::process::Signal;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

pub const KILLS: Case = Case {
    name: "snapshot-kills",
    about: "36 times SIGKILL for husk, monitor or VMM in a save or a restore: no half snapshot is used, no data is lost, nothing is left",
    limit: Duration::from_secs(2 * 3600),
    run,
};

/// Kills of each kind in a save and in a restore.
const EACH: u32 = 6;
const KINDS: [Kind; 3] = [Kind::Command, Kind::Monitor, Kind::Vmm];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Command,
    Monitor,
    Vmm,
}

fn run(ctx: &TestContext) -> Result<()> {
    processes::adopt_orphans()?;
    let seed = seed()?;
    println!("the seed of the moments: {seed}");
    let mut moments = Rng::with_seed(seed);
    // On another file system than the snapshots: the disk is not included.
    let image = PathBuf::from(format!("/dev/shm/husk-kills-{}.img", std::process::id()));
    File::create(&image)?.set_len(8 << 20)?;
    for kind in KINDS {
        ctx.part(&format!("{kind:?} in a save"), || {
            saves(ctx, kind, &mut moments, &image)
        });
    }
    std::fs::remove_file(&image)?;
    for kind in KINDS {
        ctx.part(&format!("{kind:?} in a restore"), || {
            restores(ctx, kind, &mut moments)
        });
    }
    Ok(())
}

/// A guest with 96 MiB that are not zero, so that a save takes a while.
fn start<'c>(ctx: &'c TestContext, manifest: Manifest) -> Result<Vm<'c>> {
    let manifest = manifest
        .memory("256Mi")
        .small(&images::small("6.12")?, "disks,shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok(
        "dmesg -n 1; mkdir -p /tmp; head -c 1048576 /dev/urandom > /tmp/random; \
         for mib in $(seq 96); do cat /tmp/random; done > /tmp/filled",
    )?;
    Ok(vm)
}

fn with_disk(image: &Path) -> Manifest {
    Manifest::new("victim").claim("data", "data", image)
}

/// Time that a whole snapshot of the VM takes.
fn measured(ctx: &TestContext, dir: &Path) -> Result<Duration> {
    let begun = Instant::now();
    ctx.run_within(&["snapshot", "victim", &text(dir)], SAVE)?.ok()?;
    Ok(begun.elapsed())
}

fn saves(ctx: &TestContext, kind: Kind, moments: &mut Rng, image: &Path) -> Result<()> {
    let mut vm = start(ctx, with_disk(image))?;
    let dir = ctx.path("kills");
    let whole = measured(ctx, &dir)?;
    std::fs::remove_dir_all(&dir)?;
    ctx.run(&["resume", "victim"])?.ok()?;
    for number in 0..EACH {
        let moment = whole.mul_f64(moments.f64());
        let name = format!("kill {number} after {moment:?} of {whole:?}");
        let mark = format!("{kind:?} {number}");
        let shell = Shell::going_on(vm.console())?;
        shell.ok(&format!(
            "echo {mark} | dd of=/dev/vda bs=512 conv=sync,fsync status=none"
        ))?;
        let command = Session::piped(
            ctx.husk(&["snapshot", "victim", &text(&dir)]),
            &ctx.log("killed.log"),
        )?;
        sleep(moment);
        match kind {
            Kind::Command => command.kill()?,
            Kind::Monitor => vm.kill("monitorPid")?,
            Kind::Vmm => vm.kill("vmmPid")?,
        }
        let _ = command.wait(TIMEOUT)?;
        if kind == Kind::Command {
            goes_on(ctx, &vm).context(name.clone())?;
            half_or_whole(ctx, &dir, false).context(name)?;
        } else {
            vm.end(TIMEOUT)?.fails(1).context(name.clone())?;
            half_or_whole(ctx, &dir, true).context(name)?;
            vm = start(ctx, with_disk(image))?;
            let found = Shell::going_on(vm.console())?
                .ok("dd if=/dev/vda bs=512 count=1 iflag=direct status=none | head -n 1")?;
            ensure!(
                found == mark || found == "restored",
                "{found:?} instead of {mark:?}"
            );
        }
    }
    vm.discard()
}

/// The VM runs, or is paused by a snapshot that was complete, and answers.
fn goes_on(ctx: &TestContext, vm: &Vm<'_>) -> Result<()> {
    // The monitor notices the end of the command, and takes back what it has written.
    sleep(Duration::from_secs(1));
    if vm.inspect()?["paused"] == true {
        ctx.run(&["resume", "victim"])?.ok()?;
    }
    Shell::going_on(vm.console())?.ok("true")?;
    Ok(())
}

/// Checks that `husk restore` refuses an incomplete snapshot by name, and with `restore` that the VM goes on from a
/// complete one. Removes the directory.
fn half_or_whole(ctx: &TestContext, dir: &Path, restore: bool) -> Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    if dir.join("snapshot.json").exists() {
        if restore {
            let vm = Vm::restore(ctx, dir, "victim")?;
            let shell = Shell::going_on(vm.console())?;
            shell.ok("echo restored | dd of=/dev/vda bs=512 conv=sync,fsync status=none")?;
            vm.discard()?;
        }
    } else {
        let refused = ctx.run_within(&["restore", &text(dir), "--name", "half"], TIMEOUT)?;
        refused.fails_with(1, &["not a complete snapshot", &text(dir)])?;
    }
    Ok(std::fs::remove_dir_all(dir)?)
}

fn restores(ctx: &TestContext, kind: Kind, moments: &mut Rng) -> Result<()> {
    let vm = start(ctx, Manifest::new("victim").empty_disk("data", "8Mi"))?;
    let dir = ctx.path("good");
    measured(ctx, &dir)?;
    vm.discard()?;
    let begun = Instant::now();
    let vm = Vm::restore(ctx, &dir, "victim")?;
    let whole = begun.elapsed();
    vm.discard()?;
    let mut any = false;
    for number in 0..EACH {
        let moment = whole.mul_f64(moments.f64());
        let name = format!("kill {number} after {moment:?} of {whole:?}");
        let command = Session::piped(
            ctx.husk(&["restore", &text(&dir), "--name", "victim"]),
            &ctx.log("killed.log"),
        )?;
        sleep(moment);
        any |= match kind {
            Kind::Command => command.kill().map(|()| true)?,
            // Before it is there, nothing is killed, and the VM runs.
            Kind::Monitor => kill_program("husk-monitor")?,
            Kind::Vmm => kill_program("husk-vmm")?,
        };
        // A VM that runs goes on without its command.
        let killed = || -> Result<bool> {
            let ended = command.ended()?.is_some();
            Ok(ended || command.output().all().contains("victim: running"))
        };
        until(killed).with_context(|| name.clone())?;
        sleep(Duration::from_millis(500));
        if ctx.list()?.contains(&"victim".to_owned()) {
            // One that was starting may have ended by itself meanwhile.
            let stopped = ctx.run(&["stop", "--force", "victim"])?;
            if stopped.status != 0 {
                stopped.fails_with(1, &["no VM victim is running"])?;
            }
        }
        let _ = command.wait(TIMEOUT)?;
        ctx.nothing_left(Duration::from_secs(10))
            .with_context(|| name.clone())?;
        let left = std::fs::read_dir(ctx.path("scratch"))?.count();
        ensure!(
            left == 0,
            "{name}: {left} files are left in the scratch directory"
        );
    }
    ensure!(any, "no process to kill was found at any moment");
    // The snapshot is as it was.
    let vm = Vm::restore(ctx, &dir, "victim")?;
    Shell::going_on(vm.console())?.ok("sha256sum /tmp/filled")?;
    vm.discard()?;
    Ok(std::fs::remove_dir_all(&dir)?)
}

/// Kills a descendant whose command line begins with these words. Returns false if there is none.
fn kill_program(words: &str) -> Result<bool> {
    let named = |command: &str| command.starts_with(words) || command.contains(&format!("/{words}"));
    let found = descendants().into_iter().find(|process| named(&process.command));
    found.map_or(Ok(false), |process| {
        processes::kill(process.pid, Signal::KILL).map(|()| true)
    })
}
