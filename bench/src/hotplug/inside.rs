//! The process that runs where KVM is: starts guests, one at a time, adds and removes a disk, and reports the values.

use super::case::{Asked, CACHE, Case, MEMORY_MIB, Plug};
use super::console_trace::{ConsoleTrace, FILTER};
use crate::bench_files::{self, BenchFiles, Sources};
use crate::cases::BenchCase;
use crate::counted::{CountedJob, plans};
use crate::guest::SCRIPT;
use crate::rounds::Attempts;
use crate::started::{Started, milliseconds};
use crate::trace::{PORTS, Trace};
use crate::{host, message};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use xtask::lab::counted::CountedMachine;

/// Cases and parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Files of all guests, with `husk-uevents`.
    pub sources: Sources,
    /// Measured cases.
    pub cases: Vec<Case>,
    /// Rounds, each with a new guest of every case.
    pub rounds: u32,
    /// Additions to a guest as a warm-up, which are not measured.
    pub warmups: u32,
    /// Measured additions to a guest.
    pub additions: u32,
}

impl Plan {
    /// The measurement in machines whose clock counts instructions.
    pub fn counted_job(&self) -> CountedJob<Self> {
        let one = |case: Case, ()| Self {
            sources: self.sources.counted(),
            cases: vec![case],
            rounds: 1,
            ..*self
        };
        CountedJob {
            bench: "hotplug",
            files: self.sources.files().collect(),
            system: CountedMachine::with_file_system,
            rounds: self.rounds,
            plans: plans(&self.cases, &[()], one),
        }
    }
}

/// Program that shows the guest's events.
pub const UEVENTS: &str = "husk-uevents";
/// Size of the disk, which stays empty.
const DISK_MIB: u64 = 64;
/// Time limit until user space runs.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit of an addition and its removal.
const PLUG_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which all work that follows the event is done.
const REST: Duration = Duration::from_millis(100);
/// Number of runs that may fail.
const SPARE: u32 = 2;

/// Runs the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = bench_files::folder()?;
    let bench = Bench::new(plan, folder.path())?;
    let facts = [
        ("vcpus", json!(1)),
        ("memory_mib", json!(MEMORY_MIB)),
        ("command_line", json!(SCRIPT)),
        ("disk_mib", json!(DISK_MIB)),
        ("cache", json!(CACHE)),
        ("additions", json!(plan.additions)),
        ("warmups", json!(plan.warmups)),
    ];
    message::env(host::facts(&bench.files.husk)?, facts);
    Attempts::new(SPARE).rounds(&plan.cases, plan.rounds, |case, round| bench.measure(case, round))
}

struct Bench<'a> {
    plan: &'a Plan,
    files: BenchFiles,
    image: PathBuf,
    trace: Trace,
}

/// Times of a disk's addition and removal.
struct Plugged {
    serial: String,
    asked: Asked,
    /// Request to remove the disk.
    removal: Instant,
    /// The image is closed.
    free: Instant,
}

impl<'a> Bench<'a> {
    fn new(plan: &'a Plan, folder: &Path) -> Result<Self> {
        let files = BenchFiles::gather(&plan.sources, folder)?;
        let count = format!("{}\n", plan.warmups + plan.additions);
        files.pack_program(
            UEVENTS,
            &[
                ("script", include_bytes!("guest.sh")),
                ("count", count.as_bytes()),
            ],
        )?;
        let image = folder.join("data.img");
        File::create_new(&image)?.set_len(DISK_MIB << 20)?;
        let trace = Trace::new()?;
        trace.narrow(PORTS, FILTER)?;
        Ok(Self {
            plan,
            files,
            image,
            trace,
        })
    }

    /// Runs all additions in one guest. Its values are reported at the end, all or none.
    fn measure(&self, case: Case, run: u32) -> Result<()> {
        let all = self.plan.warmups + self.plan.additions;
        self.trace.begin(&[PORTS])?;
        let mut started = Started::start(case.ready(&self.files)?, TIMEOUT + PLUG_TIMEOUT * all)?;
        started.until("ready;")?;
        let mut plug = case.connect(&self.files)?;
        let mut plugged = Vec::new();
        for number in 0..all {
            // Short: each byte of it that the guest prints causes an exit.
            let disk = self.plug(&mut started, &mut plug, format!("d{number}"));
            plugged.push(disk.with_context(|| format!("addition {number}"))?);
        }
        started.ended()?;
        let trace = ConsoleTrace::read(&self.trace.end()?)?;
        let counted = plugged.iter().skip(self.plan.warmups as usize);
        let values = counted
            .map(|disk| disk.figures(&trace))
            .collect::<Result<Vec<_>>>()?;
        let values = values.into_iter().flatten();
        let values = values.map(|(metric, time)| (metric, "ms", milliseconds(time)));
        message::values("hotplug", case.name(), run, values);
        Ok(())
    }

    /// Adds and removes a disk.
    fn plug(&self, started: &mut Started, plug: &mut Plug, serial: String) -> Result<Plugged> {
        std::thread::sleep(REST);
        let asked = plug.add(&serial, &self.image)?;
        started.until(&format!("+{serial};"))?;
        std::thread::sleep(REST);
        let removal = Instant::now();
        plug.remove(&serial)?;
        let free = Instant::now();
        started.until(&format!("-{serial};"))?;
        Ok(Plugged {
            serial,
            asked,
            removal,
            free,
        })
    }
}

impl Plugged {
    /// Duration of each step. The guest's times come from the trace instead of the console, because Husk's console
    /// passes through two more processes.
    fn figures(&self, trace: &ConsoleTrace) -> Result<[(&'static str, Duration); 5]> {
        let Asked {
            image,
            disk,
            answered,
        } = self.asked;
        let there = format!("+{};", self.serial);
        let gone = format!("-{};", self.serial);
        Ok([
            ("hotplug_ms", trace.since(disk, &there)?),
            ("hotplug_with_image_ms", trace.since(image, &there)?),
            ("hotplug_answer_ms", answered - disk),
            ("unplug_ms", trace.since(self.removal, &gone)?),
            ("unplug_free_ms", self.free - self.removal),
        ])
    }
}
