//! The processes of a pod, and containerd, killed one at a time; and containers made and killed at random.

use super::ctr::{LIMIT, vm, with_small};
use crate::harness::containerd::{Containerd, NAMESPACE, Version};
use crate::harness::context::TestContext;
use crate::harness::processes::{Process, gone, kill};
use crate::harness::program::Session;
use crate::harness::{Case, TIMEOUT, until};
use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use rustix::process::Signal;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

pub const ONE: Case = Case {
    name: "shim-killed",
    about: "kill -9 of the shim, the VMM and containerd: what goes, what goes on, and that nothing is left",
    limit: LIMIT,
    run: killed,
};

pub const FEW: Case = Case {
    name: "shim-cycles",
    about: "12 VMs made and killed in random states: nothing is left",
    limit: LIMIT,
    run: |ctx| cycles(ctx, 12),
};

pub const HUNDRED: Case = Case {
    name: "shim-cycles-100",
    about: "100 VMs made and killed in random states: nothing is left",
    limit: Duration::from_secs(3600),
    run: |ctx| cycles(ctx, 100),
};

/// Time within which a VMM must exit after its shim.
pub const WITH_SHIM: Duration = Duration::from_secs(5);

fn killed(ctx: &TestContext) -> Result<()> {
    let containerd = with_small(ctx, Version::V2_1)?;
    let c = &containerd;
    ctx.part("shim", || {
        let vmm = start(c, "one")?;
        kill(c.shim("one")?, Signal::KILL)?;
        gone(vmm, WITH_SHIM)?;
        until(|| Ok(c.task("one")?.is_none_or(|(_, state)| state == "STOPPED")))
            .context("containerd does not know that it ended")?;
        c.remove("one")?;
        c.nothing_left()
    });
    ctx.part("vmm", || {
        kill(start(c, "two")?, Signal::KILL)?;
        c.until("two", "STOPPED", TIMEOUT)?;
        ensure!(c.remove("two")? == 137, "not the status of a killed process");
        c.nothing_left()
    });
    ctx.part("memory", || {
        let log = ctx.log("events.log");
        let events = Session::piped(c.ctr_command(&["events"]), &log)?;
        start(c, "greedy")?;
        // As if the VMM needed more than it declares.
        let cgroup = Path::new("/sys/fs/cgroup").join(NAMESPACE).join("greedy");
        std::fs::write(cgroup.join("memory.swap.max"), "0")?;
        std::fs::write(cgroup.join("memory.max"), "16M")?;
        c.until("greedy", "STOPPED", TIMEOUT)?;
        events.expect("/tasks/oom", TIMEOUT)?;
        ensure!(c.remove("greedy")? == 137, "not the status of a killed process");
        c.nothing_left()
    });
    ctx.part("containerd", || {
        let vmm = start(c, "three")?;
        c.kill()?;
        sleep(Duration::from_secs(1));
        let runs = Process::read(vmm).is_some_and(|process| process.runs());
        ensure!(runs, "the VM went with containerd");
        c.restart()?;
        ensure!(
            c.task("three")? == Some((vmm, "RUNNING".to_owned())),
            "containerd does not know the VM any more"
        );
        c.ctr(&["tasks", "kill", "--signal", "SIGKILL", "three"])?.ok()?;
        c.until("three", "STOPPED", TIMEOUT)?;
        ensure!(c.remove("three")? == 137, "not killed");
        c.nothing_left()
    });
    ctx.part("vmm without containerd", || {
        let vmm = start(c, "five")?;
        c.kill()?;
        kill(vmm, Signal::KILL)?;
        gone(vmm, WITH_SHIM)?;
        c.restart()?;
        // Its shim still has the exit status.
        c.until("five", "STOPPED", TIMEOUT)?;
        ensure!(c.remove("five")? == 137, "not killed");
        c.nothing_left()
    });
    ctx.part("both", || {
        let vmm = start(c, "four")?;
        c.kill()?;
        kill(c.shim("four")?, Signal::KILL)?;
        gone(vmm, WITH_SHIM)?;
        c.restart()?;
        c.remove("four")?;
        c.nothing_left()
    });
    Ok(())
}

/// Starts a VM; returns its VMM.
fn start(c: &Containerd<'_>, name: &str) -> Result<i32> {
    c.detached(&vm("sleep"), &[], "small", name)?;
    Ok(c.task(name)?.context("no task")?.0)
}

fn cycles(ctx: &TestContext, count: u32) -> Result<()> {
    let containerd = with_small(ctx, Version::V2_1)?;
    let c = &containerd;
    let seed = u64::from(std::process::id()) << 20;
    println!("the seed is {seed}");
    let mut random = Rng::with_seed(seed);
    for number in 1..=count {
        let name = format!("cycle{number}");
        let words = ["sleep", "panic", "button", "poweroff"][random.usize(..4)];
        let way = random.u64(..5);
        let (wait, about) = (random.u64(..2500), format!("{name}: {words}, way {way}"));
        cycle(c, &name, words, way, Duration::from_millis(wait)).context(about)?;
    }
    c.nothing_left()
}

/// Ends a VM in the given `way`, after a while.
fn cycle(c: &Containerd<'_>, name: &str, words: &str, way: u64, wait: Duration) -> Result<()> {
    let mut options = c.run_words(&vm(words), &[], "small", name);
    options.insert(1, "--detach".to_owned());
    let log = c.ctx().log("cycles.log");
    let client = Session::piped(c.ctr_command(&options), &log)?;
    sleep(wait);
    match way {
        // Kills the processes started so far: there may be none yet, or none left.
        0 => drop(c.shim(name).map(|shim| kill(shim, Signal::KILL))),
        1 => {
            client.wait(TIMEOUT)?;
            if let Some((vmm, _)) = c.task(name)?.filter(|(pid, _)| *pid > 1) {
                let _ = kill(vmm, Signal::KILL);
            }
        }
        2 => client.kill()?,
        _ => {
            client.wait(TIMEOUT)?;
            let signal = if way == 3 { "SIGTERM" } else { "SIGKILL" };
            c.ctr(&["tasks", "kill", "--signal", signal, name])?;
        }
    }
    drop(client);
    let deadline = Instant::now() + TIMEOUT;
    while c.ctr(&["containers", "info", name])?.status == 0 {
        ensure!(Instant::now() < deadline, "it cannot be removed");
        c.ctr(&["tasks", "kill", "--signal", "SIGKILL", name])?;
        c.ctr(&["tasks", "rm", name])?;
        c.ctr(&["containers", "rm", name])?;
    }
    Ok(())
}
