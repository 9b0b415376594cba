//! The process that runs where KVM is: starts guests, one at a time, and reports the measured values.

use super::case::{DISK_MIB, KERNEL_MIB, Source};
use super::exits::Exits;
use super::profile::Profile;
use super::unpacking;
use crate::bench_files::{self, BenchFiles, Sources};
use crate::cases::BenchCase;
use crate::counted::{CountedJob, plans};
use crate::guest::{EARLY, FIRST_LINE, IDLE, USERSPACE};
use crate::rounds::{Attempts, Turn, turns};
use crate::started::{Started, milliseconds};
use crate::trace::{self, END_PORTS, ENDS, EXITS, PORTS, Trace};
use crate::vmm::Vmm;
use crate::{host, message, smaps};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use xtask::finish::finish;
use xtask::lab::counted::CountedMachine;

/// Cases and parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Files of all guests that boot the kernel.
    pub sources: Sources,
    /// Disk image of a whole Debian.
    pub disk: PathBuf,
    /// Cases that boot the kernel.
    pub cases: Vec<Vmm>,
    /// Rounds of timed boots of the kernel.
    pub rounds: u32,
    /// Also time its first line in each round.
    pub first_line: bool,
    /// Also time in each round what unpacking adds to a boot of Husk.
    pub unpacking: bool,
    /// Rounds of profiled boots.
    pub observed: u32,
    /// Rounds of boots of the disk.
    pub disk_rounds: u32,
    /// Boot everything once as a warm-up, and wait for the disk's login prompt.
    pub thorough: bool,
}

impl Plan {
    /// The measurement in machines whose clock counts instructions. Guests hang in some, so each has one only.
    pub fn counted_job(&self) -> CountedJob<Self> {
        let one = |case: Vmm, ()| Self {
            sources: self.sources.counted(),
            disk: PathBuf::new(),
            cases: vec![case],
            rounds: 1,
            first_line: false,
            unpacking: self.unpacking && case == Vmm::Husk,
            observed: 0,
            disk_rounds: 0,
            thorough: false,
        };
        CountedJob {
            bench: "boot",
            files: self.sources.files().collect(),
            system: CountedMachine::with_xz,
            rounds: self.rounds,
            plans: plans(&self.cases, &[()], one),
        }
    }
}

/// First line of the init of the disk's root file system.
const SYSTEMD: &str = "systemd[1]: systemd ";
const LOGIN: &str = "login: ";

/// The kernel's command line, to which `husk.do=` and what ends the guest are added. It is complete, as the others are:
/// none needs an argument that a VMM adds.
pub(super) const TIMED: &str = "console=ttyS0 quiet";

pub(super) const KERNEL_TIMEOUT: Duration = Duration::from_secs(90);
const DISK_TIMEOUT: Duration = Duration::from_secs(240);
/// Time after which a guest's user space is idle.
const REST: Duration = Duration::from_secs(1);
/// Number of runs that may fail.
const SPARE: u32 = 2;

/// Runs the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = bench_files::folder()?;
    let bench = Bench {
        files: BenchFiles::gather(&plan.sources, folder.path())?,
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
        attempts.warm_up(cases, |vmm| bench.timed(vmm, None))?;
    }
    for Turn { case, round, what } in turns(cases, plan.rounds) {
        attempts.run(case.name(), &what, || bench.timed(case, Some(round)))?;
        if plan.first_line {
            attempts.run(case.name(), &what, || bench.first_line(case, round))?;
        }
        if plan.unpacking && case == Vmm::Husk {
            attempts.run(case.name(), &what, || unpacking::measure(&bench.files, round))?;
        }
    }
    for Turn { case, round, what } in turns(cases, plan.observed) {
        let what = format!("a closer look, {what}");
        attempts.run(case.name(), &what, || bench.observed(case, round))?;
    }
    for Turn { case, round, what } in turns(&Vmm::WITH_DISK, plan.disk_rounds) {
        if cases.contains(&case) {
            attempts.run(&case.disk_name(), &what, || bench.disk(case, round, plan))?;
        }
    }
    Ok(())
}

struct Bench {
    files: BenchFiles,
    trace: Trace,
}

impl Bench {
    fn start(&self, vmm: Vmm, source: Source<'_>, timeout: Duration) -> Result<Started> {
        Started::start(vmm.with_source(&self.files, source)?, timeout)
    }

    /// Times a boot and a poweroff.
    fn timed(&self, vmm: Vmm, run: Option<u32>) -> Result<()> {
        self.trace.begin(ENDS)?;
        self.trace.narrow(PORTS, END_PORTS)?;
        let append = format!("{TIMED} husk.do={}", vmm.off());
        let mut started = self.start(vmm, Source::Kernel(&append), KERNEL_TIMEOUT)?;
        let to_userspace = since_start(&mut started, USERSPACE)?;
        started.until("\n")?;
        let uptime: f64 = started.serial.said().trim().parse().context("no uptime")?;
        let to_exit = milliseconds(started.ended()?);
        let ended = trace::now()?;
        let cpu = milliseconds(started.group.cpu()?);
        let execs = Exits::read(&self.trace.end()?, None);
        let Some(run) = run else {
            return Ok(());
        };
        let mut values = vec![
            ("to_userspace_ms", to_userspace),
            ("guest_clock_ms", uptime * 1e3),
            ("before_clock_ms", to_userspace - uptime * 1e3),
            ("to_exit_ms", to_exit),
            ("cpu_ms", cpu),
        ];
        // The power register of a microvm is not a port.
        if vmm != Vmm::Microvm {
            let off = execs.last_port.context("the trace shows no end of the guest")?;
            values.push(("end_ms", (ended - off) * 1e3));
        }
        if let (Some((_, first)), Some(exec)) = (execs.execs.first(), execs.exec("husk-vmm")) {
            values.push(("vmm_to_userspace_ms", to_userspace - (exec - first) * 1e3));
        }
        let values = values.into_iter().map(|(metric, value)| (metric, "ms", value));
        message::values("boot", vmm.name(), run, values);
        Ok(())
    }

    /// Times a boot with the kernel's earliest console, up to its first line.
    fn first_line(&self, vmm: Vmm, run: u32) -> Result<()> {
        let mut started = self.start(vmm, Source::Kernel(EARLY), KERNEL_TIMEOUT)?;
        let first_line = since_start(&mut started, FIRST_LINE)?;
        message::values("boot", vmm.name(), run, [("pre_kernel_ms", "ms", first_line)]);
        Ok(())
    }

    /// Traces a boot, then measures the idle guest.
    fn observed(&self, vmm: Vmm, run: u32) -> Result<()> {
        self.trace.begin(EXITS)?;
        let mut started = self.start(vmm, Source::Kernel(IDLE), KERNEL_TIMEOUT)?;
        started.until(USERSPACE)?;
        let exits = Exits::read(&self.trace.end()?, Some(USERSPACE));
        ensure!(exits.marker.is_some(), "the trace shows no {USERSPACE}");
        std::thread::sleep(REST);
        let pid = vmm.process(&started)?;
        let vmm_memory = smaps::resident(pid, KERNEL_MIB)?;
        let mut pod = vmm_memory.own_kib;
        for pid in started.companions(pid)? {
            pod += smaps::resident(pid, 0)?.own_kib;
        }
        let mut values = vec![
            ("vmm_rss_kib".to_owned(), "KiB", vmm_memory.own_kib),
            ("pod_rss_kib".to_owned(), "KiB", pod),
            ("kvm_exits".to_owned(), "count", exits.reasons.values().sum()),
            (
                "kvm_exits_to_vmm".to_owned(),
                "count",
                exits.to_vmm.values().sum(),
            ),
        ];
        let reasons = exits.reasons.iter();
        values.extend(reasons.map(|(reason, count)| (format!("kvm_exits.{reason}"), "count", *count)));
        let values = values
            .into_iter()
            .map(|(metric, unit, value)| (metric, unit, value as f64));
        message::values("boot", vmm.name(), run, values);
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
        let mut cp = Command::new("cp");
        cp.args(["--sparse=always", "--reflink=auto"]);
        finish(cp.arg(&plan.disk).arg(copy.path()))?;
        let mut started = self.start(vmm, Source::Disk(copy.path()), DISK_TIMEOUT)?;
        let to_userspace = since_start(&mut started, SYSTEMD)?;
        let uptime = stamp(&started.serial.said()).context("the kernel's log has no times")?;
        let mut values = vec![
            ("to_userspace_ms", "ms", to_userspace),
            ("guest_clock_ms", "ms", uptime * 1e3),
        ];
        if plan.thorough {
            values.push(("to_login_ms", "ms", since_start(&mut started, LOGIN)?));
        }
        message::values("boot", &vmm.disk_name(), run, values);
        Ok(())
    }
}

/// Seconds of the kernel's clock before the last line of its log: `[    3.141592] `.
fn stamp(log: &str) -> Option<f64> {
    let (_, last) = log.rsplit_once('[')?;
    last.split_once(']')?.0.trim().parse().ok()
}

/// Milliseconds from the start until the guest prints `words`.
pub(super) fn since_start(started: &mut Started, words: &str) -> Result<f64> {
    Ok(milliseconds(started.until(words)? - started.began))
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
