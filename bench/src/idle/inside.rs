//! The process that runs where KVM is: starts a guest of each case and watches both while they are idle.

use crate::bench_files::{self, BenchFiles, Sources};
use crate::guest::{self, Guest, USERSPACE};
use crate::started::Started;
use crate::{host, kvm, message, smaps};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::{Duration, Instant};
use xtask::finish::finish;

/// Parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Files of the guests.
    pub sources: Sources,
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
/// Metrics and their titles.
pub const METRICS: [(&str, &str); 3] = [
    (EXITS, "VM exits a second"),
    (RESIDENT, "memory beside the guest, KiB"),
    (VMM, "  of the VMM, KiB"),
];

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
    let files = BenchFiles::gather(&plan.sources, folder.path())?;
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
            started.until(USERSPACE)?;
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
    let mut asked = guest::husk(files);
    asked.args(["guest", "exec", WITH_AGENT, "--", "/bin/busybox", "true"]);
    finish(&mut asked).context("the guest agent does not answer")?;
    Ok(())
}

fn exits(started: &Started) -> Result<u64> {
    kvm::exits(&started.group)?.context("debugfs shows no exits of the guest")
}

impl Watched {
    fn report(&self, run: u32) -> Result<()> {
        let exits = exits(&self.started)? - self.exits;
        let exits = exits as f64 / self.since.elapsed().as_secs_f64();
        let vmm = self.started.group.find("husk-vmm")?;
        let own = smaps::resident(vmm, MIB)?.own_kib;
        let monitor = self.started.companions(vmm)?;
        ensure!(!monitor.is_empty(), "no monitor runs");
        let mut all = own;
        for pid in monitor {
            all += smaps::resident(pid, 0)?.own_kib;
        }
        let values = [
            (EXITS, "1/s", exits),
            (VMM, "KiB", own as f64),
            (RESIDENT, "KiB", all as f64),
        ];
        message::values("idle", self.case, run, values);
        Ok(())
    }
}
