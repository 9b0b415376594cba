//! The process that runs where KVM is: starts guests, one at a time, and reports the measured values.

use super::case::{DISK_MIB, KERNEL_MIB, Source};
use super::exits::Exits;
use super::profile::Profile;
use crate::bench_files::{self, BenchFiles};
use crate::guest::FLOOR_PROGRAM;
use crate::peers::Peers;
use crate::record::Measurement;
use crate::rounds::{Attempts, rotated};
use crate::started::{Started, milliseconds};
use crate::trace::{END_PORTS, ENDS, EXITS, PORTS, Trace};
use crate::vmm::Vmm;
use crate::{host, message, smaps};
use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Cases and parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Folder of Husk's programs.
    pub release: PathBuf,
    /// Kernel of all guests.
    pub kernel: PathBuf,
    /// Initrd of all guests.
    pub initrd: PathBuf,
    /// Disk image of a whole Debian.
    pub disk: PathBuf,
    /// Other VMMs.
    pub peers: Peers,
    /// Cases that boot the kernel.
    pub cases: Vec<Vmm>,
    /// Rounds of timed boots of the kernel.
    pub rounds: u32,
    /// Also time its first line in each round.
    pub first_line: bool,
    /// Rounds of profiled boots.
    pub observed: u32,
    /// Rounds of boots of the disk.
    pub disk_rounds: u32,
    /// Boot everything once as a warm-up, and wait for the disk's login prompt.
    pub thorough: bool,
}

/// First line of the initrd.
const MARKER: &str = "HUSK-USERSPACE";
/// First line of the kernel.
const FIRST_LINE: &str = "Linux version";
/// First line of the init of the disk's root file system.
const SYSTEMD: &str = "systemd[1]: systemd ";
const LOGIN: &str = "login: ";

/// The kernel command lines, which are complete: none needs an argument that a VMM adds. `husk.do=` and what ends the
/// guest follow the first.
const TIMED: &str = "console=ttyS0 quiet";
const EARLY: &str = "console=ttyS0 earlyprintk=ttyS0,115200 husk.do=sleep";
const IDLE: &str = "console=ttyS0 quiet husk.do=sleep";

const KERNEL_PATIENCE: Duration = Duration::from_secs(90);
const DISK_PATIENCE: Duration = Duration::from_secs(240);
/// Time after which a guest's user space is idle.
const REST: Duration = Duration::from_secs(1);
/// Number of runs that may fail.
const SPARE: u32 = 2;

/// Runs the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = bench_files::folder()?;
    let files = BenchFiles::gather(&plan.release, &plan.kernel, &plan.initrd, folder.path())?;
    if plan.cases.contains(&Vmm::Floor) {
        files.add(&plan.release.join(FLOOR_PROGRAM))?;
    }
    let bench = Bench {
        peers: plan.peers.gathered(&files)?,
        files,
        trace: Trace::new()?,
    };
    let cases = &plan.cases;
    let facts = [
        ("vcpus", json!(1)),
        ("memory_mib", json!(KERNEL_MIB)),
        ("disk_memory_mib", json!(DISK_MIB)),
        ("command_line", json!(TIMED)),
        ("disk_userspace_is", json!(SYSTEMD)),
    ];
    message::env(host::facts(&bench.files.husk)?, facts);
    let attempts = Attempts::new(SPARE);
    if plan.thorough {
        for &vmm in cases {
            attempts.run(vmm.name(), "warming up", || bench.timed(vmm, None))?;
        }
    }
    for run in 1..=plan.rounds {
        for vmm in rotated(cases, run) {
            let what = format!("round {run} of {}", plan.rounds);
            attempts.run(vmm.name(), &what, || bench.timed(vmm, Some(run)))?;
            if plan.first_line {
                attempts.run(vmm.name(), &what, || bench.first_line(vmm, run))?;
            }
        }
    }
    for run in 1..=plan.observed {
        for vmm in rotated(cases, run) {
            let what = format!("a closer look, {run} of {}", plan.observed);
            attempts.run(vmm.name(), &what, || bench.observed(vmm, run))?;
        }
    }
    for run in 1..=plan.disk_rounds {
        for vmm in rotated(&Vmm::WITH_DISK, run) {
            if !cases.contains(&vmm) {
                continue;
            }
            let what = format!("round {run} of {}", plan.disk_rounds);
            attempts.run(&vmm.disk_name(), &what, || bench.disk(vmm, run, plan))?;
        }
    }
    Ok(())
}

struct Bench {
    files: BenchFiles,
    peers: Peers,
    trace: Trace,
}

impl Bench {
    fn start(&self, vmm: Vmm, source: Source<'_>, patience: Duration) -> Result<Started> {
        Started::start(vmm.ready(&self.files, &self.peers, source)?, patience)
    }

    /// Times a boot and a poweroff.
    fn timed(&self, vmm: Vmm, run: Option<u32>) -> Result<()> {
        self.trace.begin(ENDS)?;
        self.trace.narrow(PORTS, END_PORTS)?;
        let append = format!("{TIMED} husk.do={}", vmm.off());
        let mut started = self.start(vmm, Source::Kernel(&append), KERNEL_PATIENCE)?;
        let to_userspace = since_start(&mut started, MARKER)?;
        started.until("\n")?;
        let uptime: f64 = started.serial.said().trim().parse().context("no uptime")?;
        let to_exit = milliseconds(started.ended()?);
        let ended = Duration::try_from(clock_gettime(ClockId::Monotonic))?.as_secs_f64();
        let cpu = milliseconds(started.group.cpu()?);
        let execs = Exits::read(&self.trace.end()?, None);
        let Some(run) = run else {
            return Ok(());
        };
        let report = |metric, value| measured(vmm.name(), metric, "ms", value, run);
        report("to_userspace_ms", to_userspace);
        report("guest_clock_ms", uptime * 1e3);
        report("before_clock_ms", to_userspace - uptime * 1e3);
        report("to_exit_ms", to_exit);
        // The power register of a microvm is not a port.
        if vmm != Vmm::Microvm {
            let off = execs.last_port.context("the trace shows no end of the guest")?;
            report("end_ms", (ended - off) * 1e3);
        }
        report("cpu_ms", cpu);
        if let (Some((_, first)), Some(vmm)) = (execs.execs.first(), execs.exec("husk-vmm")) {
            report("vmm_to_userspace_ms", to_userspace - (vmm - first) * 1e3);
        }
        Ok(())
    }

    /// Times a boot with the kernel's earliest console, up to its first line.
    fn first_line(&self, vmm: Vmm, run: u32) -> Result<()> {
        let mut started = self.start(vmm, Source::Kernel(EARLY), KERNEL_PATIENCE)?;
        let first_line = since_start(&mut started, FIRST_LINE)?;
        measured(vmm.name(), "pre_kernel_ms", "ms", first_line, run);
        Ok(())
    }

    /// Traces a boot, then measures the idle guest.
    fn observed(&self, vmm: Vmm, run: u32) -> Result<()> {
        self.trace.begin(EXITS)?;
        let mut started = self.start(vmm, Source::Kernel(IDLE), KERNEL_PATIENCE)?;
        started.until(MARKER)?;
        let exits = Exits::read(&self.trace.end()?, Some(MARKER));
        ensure!(exits.marker.is_some(), "the trace shows no {MARKER}");
        std::thread::sleep(REST);
        // The process that holds the guest's memory.
        let pid = match vmm {
            Vmm::Husk => started.group.find("husk-vmm")?,
            _ => started.pid(),
        };
        let vmm_memory = smaps::resident(pid, KERNEL_MIB)?;
        let mut pod = vmm_memory.own_kib;
        // Other processes that run as long as the guest, without the command that the user runs.
        let mut companions = started.group.pids()?;
        companions.retain(|other| *other != pid && *other != started.pid());
        for pid in companions {
            pod += smaps::resident(pid, 0)?.own_kib;
        }
        let report = |metric: &str, unit, value: u64| measured(vmm.name(), metric, unit, value as f64, run);
        report("vmm_rss_kib", "KiB", vmm_memory.own_kib);
        report("pod_rss_kib", "KiB", pod);
        report("kvm_exits", "count", exits.reasons.values().sum());
        report("kvm_exits_to_vmm", "count", exits.to_vmm.values().sum());
        for (reason, count) in &exits.reasons {
            report(&format!("kvm_exits.{reason}"), "count", *count);
        }
        message::more(Profile::new(vmm.name(), exits, vmm_memory));
        Ok(())
    }

    /// Times a boot of a whole Debian from a fresh copy of its disk.
    fn disk(&self, vmm: Vmm, run: u32, plan: &Plan) -> Result<()> {
        // In memory, so that the state of a disk's cache does not affect the comparison of two VMMs.
        let copy = tempfile::Builder::new()
            .prefix("husk-bench.")
            .suffix(".img")
            .tempfile_in("/dev/shm")?;
        copy_sparse(&plan.disk, copy.path())?;
        let mut started = self.start(vmm, Source::Disk(copy.path()), DISK_PATIENCE)?;
        let case = vmm.disk_name();
        let to_userspace = since_start(&mut started, SYSTEMD)?;
        let uptime = stamp(&started.serial.said()).context("the kernel's log has no times")?;
        if plan.thorough {
            let to_login = since_start(&mut started, LOGIN)?;
            measured(&case, "to_login_ms", "ms", to_login, run);
        }
        measured(&case, "to_userspace_ms", "ms", to_userspace, run);
        measured(&case, "guest_clock_ms", "ms", uptime * 1e3, run);
        Ok(())
    }
}

/// Seconds of the kernel's clock before the last line of its log: `[    3.141592] `.
fn stamp(log: &str) -> Option<f64> {
    let (_, last) = log.rsplit_once('[')?;
    last.split_once(']')?.0.trim().parse().ok()
}

/// Milliseconds from the start until the guest prints `words`.
fn since_start(started: &mut Started, words: &str) -> Result<f64> {
    Ok(milliseconds(started.until(words)? - started.began))
}

fn measured(case: &str, metric: &str, unit: &str, value: f64, run: u32) {
    message::measured(Measurement {
        bench: "boot".to_owned(),
        case: case.to_owned(),
        metric: metric.to_owned(),
        unit: unit.to_owned(),
        value,
        run,
    });
}

fn copy_sparse(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp")
        .args(["--sparse=always", "--reflink=auto"])
        .arg(from)
        .arg(to)
        .status()
        .context("cannot start cp")?;
    ensure!(status.success(), "cannot copy {}: {status}", from.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_the_time() {
        assert_eq!(stamp("[    0.5] a\n[   12.034567] "), Some(12.034_567));
        assert_eq!(stamp("Debian GNU/Linux\n"), None);
    }
}
