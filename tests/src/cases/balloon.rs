//! Memory that the guest frees is returned to the host, and the rest keeps its content.

use crate::harness::context::TestContext;
use crate::harness::guest::Shell;
use crate::harness::manifest::Manifest;
use crate::harness::vm::Vm;
use crate::harness::{Case, SMALL, TIMEOUT, images, met, poll};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

pub const CASE: Case = Case {
    name: "free-memory",
    about: "free-page reporting gives freed memory back; memory in use keeps its content while others free theirs",
    limit: SMALL,
    run,
};

const MIB: u64 = 1 << 20;

fn run(ctx: &TestContext) -> Result<()> {
    let manifest = Manifest::new("frees")
        .cpu(1, 2, 1)
        .memory("512Mi")
        .small(&images::small("6.12")?, "balloon,shell");
    let vm = Vm::start(ctx, &manifest)?;
    let shell = Shell::small(&vm)?;
    shell.ok("mkdir /t && mount -t tmpfs -o size=400m t /t && head -c 8388608 /dev/urandom > /t/kept")?;
    let sum = shell.ok("md5sum < /t/kept")?;
    for round in 1..=2 {
        shell.ok("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24; do cp /t/kept /t/$i || exit 1; done")?;
        let full = resident(&vm)?;
        ensure!(
            full > 200 * MIB,
            "only {full} bytes are resident with 200 MiB in use"
        );
        for file in ["kept", "1", "12", "24"] {
            let now = shell.ok(&format!("md5sum < /t/{file}"))?;
            ensure!(now == sum, "round {round}: {file} has changed");
        }
        shell.ok("rm /t/[0-9]*")?;
        shrinks(&vm, full - 150 * MIB)?;
    }
    ensure!(shell.ok("md5sum < /t/kept")? == sum, "what was kept has changed");
    vm.power_off(&shell)
}

/// Waits until the VMM's resident memory is at most `bytes`.
fn shrinks(vm: &Vm<'_>, bytes: u64) -> Result<()> {
    poll(TIMEOUT, Duration::from_millis(200), || {
        let now = resident(vm)?;
        met(now <= bytes, || {
            format!("{now} bytes are still resident, more than {bytes}")
        })
    })
}

/// Resident memory of the VMM in bytes.
fn resident(vm: &Vm<'_>) -> Result<u64> {
    let pid = vm.inspect()?["vmmPid"].as_u64().context("no vmmPid")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes: u64 = line
        .and_then(|line| line.trim().strip_suffix(" kB"))
        .context("no VmRSS")?
        .parse()?;
    Ok(kilobytes << 10)
}
