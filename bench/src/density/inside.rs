//! The process that runs where KVM is: starts many guests at once, and watches as many that are idle.

use super::case::{MEMORY_MIB, Vm};
use super::report::{BESIDE, CPU, EXITS, FIT, GUEST, START, STARTS, TO_USERSPACE, USED};
use crate::bench_files::{self, BenchFiles, Sources};
use crate::cases::BenchCase;
use crate::counted::{CountedJob, plans, there};
use crate::guest::{IDLE, USERSPACE};
use crate::rounds::{Attempts, Turn, turns};
use crate::trace::{self, Event, Trace};
use crate::vmm::Vmm;
use crate::{host, kvm, message};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Files of the guests that become idle.
    pub sources: Sources,
    /// The same kernel, which halts at its first instruction.
    pub halted: PathBuf,
    /// Physical addresses of that instruction.
    pub entries: [u64; 2],
    /// VMMs to compare.
    pub cases: Vec<Vmm>,
    /// Rounds of all cases.
    pub rounds: u32,
    /// Guests that run at the same time.
    pub vms: u32,
    /// Time between user space and the first count.
    pub settle: Duration,
    /// Time between the two counts.
    pub counted: Duration,
    /// Measure starts.
    pub starts: bool,
    /// Measure idle guests.
    pub idle: bool,
    /// Start guests of each case once before, as a warm-up.
    pub thorough: bool,
}

impl Plan {
    /// The measurement of starts in machines whose clock counts instructions.
    pub fn counted_job(&self) -> CountedJob<Self> {
        let one = |case: Vmm, ()| Self {
            sources: self.sources.counted(),
            halted: there(&self.halted),
            cases: vec![case],
            rounds: 1,
            thorough: false,
            ..*self
        };
        CountedJob {
            bench: "density",
            files: self.sources.files().chain([self.halted.clone()]).collect(),
            system: Ok,
            rounds: self.rounds,
            plans: plans(&self.cases, &[()], one),
        }
    }
}

const EXIT: &str = "kvm/kvm_exit";
/// Maximum time of one guest's start and boot while others do the same.
const BOOT: Duration = Duration::from_secs(60);
/// Interval between two looks at the trace, whose events have exact times.
const LOOK: Duration = Duration::from_millis(20);
/// Most readings of the machine's memory.
const READINGS: u32 = 60;
/// Interval between two of them.
const READING: Duration = Duration::from_millis(500);
/// Two readings that differ by less show that the memory of processes that ended is free.
const ALIKE_KIB: u64 = 512;
/// Number of runs that may fail.
const SPARE: u32 = 3;

/// Runs the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = bench_files::folder()?;
    let halted_folder = folder.path().join("halted");
    std::fs::create_dir(&halted_folder)?;
    let halted = Sources {
        kernel: plan.halted.clone(),
        ..plan.sources.clone()
    };
    let bench = Bench {
        plan,
        files: BenchFiles::gather(&plan.sources, folder.path())?,
        halted: BenchFiles::gather(&halted, &halted_folder)?,
        trace: Trace::new()?,
    };
    let facts = [
        ("memory_mib", json!(MEMORY_MIB)),
        ("vms", json!(plan.vms)),
        ("settle_s", json!(plan.settle.as_secs())),
        ("counted_s", json!(plan.counted.as_secs())),
    ];
    message::env(host::facts(&bench.files.husk)?, facts);
    let attempts = Attempts::new(SPARE);
    if plan.thorough {
        attempts.warm_up(&plan.cases, |case| bench.starts(case).map(|_| ()))?;
    }
    for Turn { case, round, what } in turns(&plan.cases, plan.rounds) {
        if plan.starts {
            attempts.run(case.name(), &format!("starts, {what}"), || {
                let start = bench.starts(case)?;
                let values = [(START, "ms", start * 1e3), (STARTS, "1/s", 1.0 / start)];
                message::values("density", case.name(), round, values);
                Ok(())
            })?;
        }
        if plan.idle {
            attempts.run(case.name(), &format!("idle guests, {what}"), || {
                message::values("density", case.name(), round, bench.idle(case)?);
                Ok(())
            })?;
        }
    }
    Ok(())
}

struct Bench<'a> {
    plan: &'a Plan,
    files: BenchFiles,
    /// The same with the kernel that halts.
    halted: BenchFiles,
    trace: Trace,
}

impl Bench<'_> {
    /// Starts guests that halt, all at once; returns the seconds that they take, divided by their number.
    fn starts(&self, case: Vmm) -> Result<f64> {
        let [pvh, long] = self.plan.entries;
        self.trace.begin(&[EXIT])?;
        self.trace
            .narrow(EXIT, &format!("guest_rip == {pvh:#x} || guest_rip == {long:#x}"))?;
        let began = trace::now()?;
        let deadline = Instant::now() + self.timeout();
        let mut vms = self.start_all(case, &self.halted)?;
        let last = loop {
            let halts = halts(&self.trace.text()?);
            if let (true, Some(last)) = (halts.len() >= vms.len(), halts.last()) {
                break *last;
            }
            for vm in &mut vms {
                vm.started.has_returned()?;
            }
            if Instant::now() >= deadline {
                bail!("{} of {} guests have started in time", halts.len(), vms.len());
            }
            std::thread::sleep(LOOK);
        };
        self.trace.end()?;
        Ok((last - began) / f64::from(self.plan.vms))
    }

    /// Starts guests that become idle, all at once; returns their metrics.
    fn idle(&self, case: Vmm) -> Result<[(&'static str, &'static str, f64); 7]> {
        let count = f64::from(self.plan.vms);
        let before = used_kib()?;
        let began = Instant::now();
        let mut vms = self.start_all(case, &self.files)?;
        for vm in &mut vms {
            vm.watch()?;
        }
        let mut booted = began;
        for vm in &mut vms {
            booted = booted.max(vm.until(USERSPACE)?);
        }
        std::thread::sleep(self.plan.settle);
        let since = Instant::now();
        let (exits, cpu) = cost(&vms)?;
        std::thread::sleep(self.plan.counted);
        let (exits_after, cpu_after) = cost(&vms)?;
        let time = since.elapsed().as_secs_f64();
        let (mut beside, mut guest) = (0, 0);
        for vm in &mut vms {
            let [own, guests] = vm.memory()?;
            beside += own;
            guest += guests;
        }
        let used = used_kib()?.saturating_sub(before) as f64 / count;
        let cpu = (cpu_after - cpu).as_secs_f64() * 1e3;
        Ok([
            (TO_USERSPACE, "1/s", count / (booted - began).as_secs_f64()),
            (EXITS, "1/s", (exits_after - exits) as f64 / time / count),
            (CPU, "ms", cpu / time / count),
            (BESIDE, "KiB", beside as f64 / count),
            (GUEST, "KiB", guest as f64 / count),
            (USED, "KiB", used),
            (FIT, "count", f64::from(1 << 20) / used),
        ])
    }

    fn start_all(&self, case: Vmm, files: &BenchFiles) -> Result<Vec<Vm>> {
        (1..=self.plan.vms)
            .map(|number| Vm::start(case, files, number, IDLE, self.timeout()))
            .collect()
    }

    /// Limit of all waits for guests that run at the same time.
    fn timeout(&self) -> Duration {
        BOOT * self.plan.vms + self.plan.settle + self.plan.counted
    }
}

/// Times at which guests have halted. The same instruction also exits for its page, which KVM maps at the first access.
fn halts(trace: &str) -> Vec<f64> {
    let events = trace.lines().filter_map(Event::parse);
    let halted = events.filter(|event| event.after("reason").eq_ignore_ascii_case("hlt"));
    halted.map(|event| event.time).collect()
}

/// VM exits and processor time of all `vms` so far.
fn cost(vms: &[Vm]) -> Result<(u64, Duration)> {
    let mut sum = (0, Duration::ZERO);
    for vm in vms {
        let group = &vm.started.group;
        sum.0 += kvm::exits(group)?.context("debugfs shows no exits of the guest")?;
        sum.1 += group.cpu()?;
    }
    Ok(sum)
}

/// KiB of this machine's memory that are in use, without what the kernel can take back at once: the page cache of files
/// and its caches of their names.
///
/// A process leaves its cgroup before its memory is free, so this waits until two readings are alike. It does not drop
/// the page cache: the next guests would have to read their files again.
fn used_kib() -> Result<u64> {
    let mut last = u64::MAX;
    for _ in 0..READINGS {
        let text = std::fs::read_to_string("/proc/meminfo")?;
        let used = used(&text).context("/proc/meminfo lacks a field")?;
        let used = used.saturating_sub(listed_kib(&std::fs::read_to_string("/proc/zoneinfo")?));
        if used.abs_diff(last) < ALIKE_KIB {
            return Ok(used);
        }
        last = used;
        std::thread::sleep(READING);
    }
    bail!("the machine's memory in use does not come to rest")
}

fn used(meminfo: &str) -> Option<u64> {
    let field = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_end_matches("kB").trim().parse().ok()
    };
    let cache = field("Cached:")?.checked_sub(field("Shmem:")?)?;
    let free = field("MemFree:")? + field("Buffers:")? + cache + field("SReclaimable:")?;
    field("MemTotal:")?.checked_sub(free)
}

/// KiB of free pages in the lists of the processors, which `MemFree` lacks. They may be those of whole guests.
fn listed_kib(zoneinfo: &str) -> u64 {
    let counts = zoneinfo
        .lines()
        .filter_map(|line| line.trim().strip_prefix("count:"));
    let pages: u64 = counts.filter_map(|count| count.trim().parse::<u64>().ok()).sum();
    pages * rustix::param::page_size() as u64 / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_are_counted_once() {
        let trace = "\
# tracer: nop
 vcpu0-102  [000] d....  11.000000: kvm_exit: vcpu 0 reason npf rip 0x1000000 info1 0x14 info2 0x0
 vcpu0-102  [000] d....  11.000020: kvm_exit: vcpu 0 reason hlt rip 0x1000000 info1 0x0 info2 0x0
 CPU 0/KVM-103  [000] d....  11.500000: kvm_exit: vcpu 0 reason HLT rip 0x1000000 info1 0x0 info2 0x0
";
        assert_eq!(halts(trace), [11.00002, 11.5]);
    }

    #[test]
    fn memory_of_tmpfs_is_in_use_and_page_cache_is_not() {
        let meminfo = "MemTotal: 1000 kB\nMemFree: 300 kB\nBuffers: 10 kB\nCached: 200 kB\nShmem: 50 kB\n\
                       SReclaimable:     40 kB\n";
        assert_eq!(used(meminfo), Some(500));
        assert_eq!(used("MemTotal: 1000 kB\n"), None);
    }

    #[test]
    fn free_pages_of_all_processors_and_zones_are_found() {
        let zoneinfo = "Node 0, zone   Normal\n  pages free     20\n  pagesets\n    cpu: 0\n              count:    3\n\
                        high:     9\n    cpu: 1\n              count: 4\n";
        assert_eq!(listed_kib(zoneinfo), 7 * rustix::param::page_size() as u64 / 1024);
    }
}
