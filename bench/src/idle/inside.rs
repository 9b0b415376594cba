//! The process that runs where KVM is: starts a guest of each case and watches both while they are idle.

use crate::bench_files::{self, BenchFiles};
use crate::guest::Guest;
use crate::record::Measurement;
use crate::started::Started;
use crate::{host, kvm, message, smaps};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Folder of Husk's programs.
    pub release: PathBuf,
    /// Kernel of the guests.
    pub kernel: PathBuf,
    /// Initrd of the guests.
    pub initrd: PathBuf,
    /// Rounds of both cases.
    pub rounds: u32,
    /// Time between user space and the first count.
    pub settle: Duration,
    /// Time between the two counts.
    pub counted: Duration,
}

/// The case without an agent.
pub const PLAIN: &str = "without agent";
/// The case with one.
pub const AGENT: &str = "with agent";
/// VM exits in a second.
pub const EXITS: &str = "exits_per_s";
/// Memory of the VMM and its monitor, without the guest's.
pub const RESIDENT: &str = "resident_kib";
const VMM: &str = "vmm_kib";
/// Metrics, their units and titles.
pub const METRICS: [(&str, &str, &str); 3] = [
    (EXITS, "1/s", "VM exits a second"),
    (RESIDENT, "KiB", "memory beside the guest, KiB"),
    (VMM, "KiB", "  of the VMM, KiB"),
];

const MARKER: &str = "HUSK-USERSPACE";
/// The guest has found its ports, and starts the agent.
const PORTS: &str = "husk-ports: org.qemu.guest_agent.0";
/// Name of the VM with an agent.
const WITH_AGENT: &str = "idle-agent";
const MIB: u64 = 192;
/// Maximum time of a boot.
const BOOT: Duration = Duration::from_secs(120);

/// A guest that runs.
struct Watched {
    case: &'static str,
    started: Started,
    exits: u64,
    since: Instant,
}

/// Runs the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = bench_files::folder()?;
    let files = BenchFiles::gather(&plan.release, &plan.kernel, &plan.initrd, folder.path())?;
    let facts = [
        ("memory_mib", json!(MIB)),
        ("counted_s", json!(plan.counted.as_secs())),
    ];
    message::env(host::facts(&files.husk)?, facts);
    for run in 1..=plan.rounds {
        message::news(format!("round {run} of {}", plan.rounds));
        let limit = BOOT * 2 + plan.settle + plan.counted;
        let mut guests = Vec::new();
        for (case, name, words) in [(PLAIN, "idle", "sleep"), (AGENT, WITH_AGENT, "agent,sleep")] {
            let append = format!("console=ttyS0 quiet husk.do={words}");
            let guest = Guest {
                name,
                vcpus: 1,
                mib: MIB,
                append: Some(&append),
            };
            let mut started = Started::start(guest.husk(&files, "", "")?, limit)?;
            started.until(MARKER)?;
            if case == AGENT {
                started.until(PORTS)?;
            }
            guests.push((case, started));
        }
        std::thread::sleep(plan.settle);
        let mut watched = Vec::new();
        for (case, started) in guests {
            let exits = exits(&started)?;
            let since = Instant::now();
            watched.push(Watched {
                case,
                started,
                exits,
                since,
            });
        }
        std::thread::sleep(plan.counted);
        for guest in &watched {
            guest.report(run)?;
        }
        answers(&files)?;
    }
    Ok(())
}

/// Fails unless the guest's agent answers: an agent that does not run would cost nothing.
fn answers(files: &BenchFiles) -> Result<()> {
    let asked = Command::new(&files.husk)
        .args(["guest", "exec", WITH_AGENT, "--", "/bin/busybox", "true"])
        .env("HUSK_RUNTIME_DIR", files.runtime.path())
        .output()?;
    let errors = String::from_utf8_lossy(&asked.stderr);
    ensure!(
        asked.status.success(),
        "the guest agent does not answer: {errors}"
    );
    Ok(())
}

fn exits(started: &Started) -> Result<u64> {
    kvm::exits(&started.group)?.context("debugfs shows no exits of the guest")
}

impl Watched {
    fn report(&self, run: u32) -> Result<()> {
        let report = |metric: &str, value: f64| {
            let unit = METRICS.iter().find(|(name, ..)| *name == metric);
            message::measured(Measurement {
                bench: "idle".to_owned(),
                case: self.case.to_owned(),
                metric: metric.to_owned(),
                unit: unit.map_or("", |(_, unit, _)| unit).to_owned(),
                value,
                run,
            });
        };
        let exits = exits(&self.started)? - self.exits;
        report(EXITS, exits as f64 / self.since.elapsed().as_secs_f64());
        let group = &self.started.group;
        let vmm = group.find("husk-vmm")?;
        let own = smaps::resident(vmm, MIB)?.own_kib;
        report(VMM, own as f64);
        let others = group
            .pids()?
            .into_iter()
            .filter(|pid| *pid != vmm && *pid != self.started.pid());
        let monitor: Vec<u32> = others.collect();
        ensure!(!monitor.is_empty(), "no monitor runs");
        let mut all = own;
        for pid in monitor {
            all += smaps::resident(pid, 0)?.own_kib;
        }
        report(RESIDENT, all as f64);
        Ok(())
    }
}
