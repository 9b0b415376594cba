//! The process that runs where KVM is: starts guests and reports the measured values.

use super::case::{APPEND, Case, MEMORY_MIB, VCPUS};
use super::containerd::Containerd;
use super::overhead::Overhead;
use super::running::{PodBench, Running};
use crate::bench_files::{self, BenchFiles, Sources};
use crate::cases::BenchCase;
use crate::guest::USERSPACE;
use crate::rounds::{Attempts, Turn, turns};
use crate::started::milliseconds;
use crate::{host, message};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

/// Cases and parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Files of all guests, with the shim.
    pub sources: Sources,
    /// Rounds of single starts.
    pub rounds: u32,
    /// Rounds of many simultaneous starts.
    pub many_rounds: u32,
    /// Number of guests.
    pub many: u32,
    /// Start everything once as a warm-up.
    pub thorough: bool,
}

/// The guest is idle.
const READY: &str = "husk-button: ready";
/// Time limit until user space of one guest runs.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Time after which a guest's user space is idle.
const REST: Duration = Duration::from_secs(1);
/// Number of runs that may fail.
const SPARE: u32 = 2;

/// Runs the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = bench_files::folder()?;
    let bench = Bench::new(plan, folder.path())?;
    let facts = [
        ("vcpus", json!(VCPUS)),
        ("memory_mib", json!(MEMORY_MIB)),
        ("command_line", json!(APPEND)),
        ("many", json!(plan.many)),
        ("containerd", json!(Containerd::version()?)),
    ];
    message::env(host::facts(&bench.bench.files.husk)?, facts);
    let attempts = Attempts::new(SPARE);
    if plan.thorough {
        attempts.warm_up(&Case::ALL, |case| bench.single(case, None))?;
    }
    attempts.rounds(&Case::ALL, plan.rounds, |case, round| {
        bench.single(case, Some(round))
    })?;
    for Turn { case, round, what } in turns(&Case::MANY, plan.many_rounds) {
        let what = format!("{} at once, {what}", plan.many);
        attempts.run(case.name(), &what, || bench.many(case, plan.many, round))?;
    }
    Ok(())
}

struct Bench {
    bench: PodBench,
    started: Cell<u32>,
}

impl Bench {
    fn new(plan: &Plan, folder: &Path) -> Result<Self> {
        let mut files = BenchFiles::gather(&plan.sources, folder)?;
        let mut containerd = Containerd::start(&files)?;
        containerd.take(&mut files)?;
        Ok(Self {
            bench: PodBench { files, containerd },
            started: Cell::new(0),
        })
    }

    fn start(&self, case: Case) -> Result<Running<'_>> {
        self.started.set(self.started.get() + 1);
        Running::start(&self.bench, case, format!("pod-{}", self.started.get()))
    }

    /// Times the start of one guest, then measures it idle.
    fn single(&self, case: Case, round: Option<u32>) -> Result<()> {
        let before = self.bench.containerd.cpu()?;
        let mut guest = self.start(case)?;
        let deadline = guest.began + TIMEOUT;
        let userspace = guest.until(USERSPACE, deadline)?;
        let (own, all) = (guest.cpu()?, self.bench.containerd.cpu()?);
        let to_userspace = milliseconds(userspace - guest.began);
        let mut values = vec![("to_userspace_ms", to_userspace), ("cpu_ms", milliseconds(own))];
        if case != Case::Q35 {
            values.push(("to_vmm_ms", guest.to_vmm()?));
        }
        if case == Case::Husk {
            let containerd = milliseconds(all - before);
            values.push(("containerd_cpu_ms", containerd));
            values.push(("cpu_with_containerd_ms", milliseconds(own) + containerd));
            values.push(("to_userspace_without_containerd_ms", to_userspace - containerd));
            values.extend(guest.to_shim()?.map(|time| ("to_shim_ms", time)));
        }
        guest.until(READY, deadline)?;
        std::thread::sleep(REST);
        // For `husk run` this includes the user's command: `bench boot` measures it.
        let overhead = match case {
            Case::HuskRun => Vec::new(),
            Case::Husk | Case::Q35 => parts(guest.overhead()?),
        };
        guest.stop()?;
        guest.gone()?;
        let Some(round) = round else {
            return Ok(());
        };
        let values = values.into_iter().map(|(metric, value)| (metric, "ms", value));
        message::values("pod", case.name(), round, values);
        for (part, overhead) in overhead {
            report(case, part, overhead, round);
        }
        Ok(())
    }

    /// Many guests, started at once and stopped at once.
    fn many(&self, case: Case, many: u32, round: u32) -> Result<()> {
        let before = self.bench.containerd.cpu()?;
        let began = Instant::now();
        let guests: Result<Vec<_>> = (0..many).map(|_| self.start(case)).collect();
        let (mut guests, mut last) = (guests?, began);
        let deadline = began + TIMEOUT * many;
        for guest in &mut guests {
            last = last.max(guest.until(USERSPACE, deadline)?);
        }
        let own: Duration = guests.iter().map(Running::cpu).sum::<Result<_>>()?;
        let containerd = self.bench.containerd.cpu()? - before;
        for guest in &mut guests {
            guest.until(READY, deadline)?;
        }
        std::thread::sleep(REST);
        let overheads = guests.iter().map(|guest| {
            let parts = parts(guest.overhead()?);
            let whole = parts.into_iter().find(|(part, _)| *part == POD);
            Ok(whole.context("no pod")?.1)
        });
        let overheads: Vec<Overhead> = overheads.collect::<Result<_>>()?;
        for guest in &guests {
            guest.stop()?;
        }
        for guest in guests {
            guest.gone()?;
        }
        let each = |time: Duration| milliseconds(time) / f64::from(many);
        let starts = f64::from(many) / (last - began).as_secs_f64();
        let mut values = vec![("starts_s", "1/s", starts), ("many_cpu_ms", "ms", each(own))];
        if case == Case::Husk {
            let all = each(own + containerd);
            values.push(("many_cpu_with_containerd_ms", "ms", all));
            values.push(("many_stopped", "count", f64::from(many)));
        }
        message::values("pod", case.name(), round, values);
        for overhead in overheads {
            report(case, "many_pod", overhead, round);
        }
        Ok(())
    }
}

const POD: &str = "pod";

/// A pod's overhead, and those of its parts if it has any.
fn parts((vmm, shim): (Overhead, Option<Overhead>)) -> Vec<(&'static str, Overhead)> {
    match shim {
        Some(shim) => vec![(POD, [vmm, shim].into_iter().sum()), ("vmm", vmm), ("shim", shim)],
        None => vec![(POD, vmm)],
    }
}

fn report(case: Case, part: &str, overhead: Overhead, round: u32) {
    let values = overhead.values();
    let values = values.map(|(what, kib)| (format!("{part}_{what}"), "KiB", kib as f64));
    message::values("pod", case.name(), round, values);
}
