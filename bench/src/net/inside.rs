//! The process that runs where KVM is: starts guests, one at a time, and reports the measured values.

use super::case::{Case, MEMORY_MIB, VCPUS};
use super::cell::{self, CELLS, Cell};
use super::wire::{self, Wire};
use crate::bench_files::{self, BenchFiles, Sources};
use crate::cases::BenchCase;
use crate::cost::Cost;
use crate::counted::{CountedJob, plans};
use crate::guest::SCRIPT;
use crate::rounds::Attempts;
use crate::started::Started;
use crate::{host, message};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::Path;
use std::time::Duration;
use xtask::lab::counted::CountedMachine;

/// Cases and parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Files of all guests, with `husk-netload`.
    pub sources: Sources,
    /// Cases to compare.
    pub cases: Vec<Case>,
    /// Only this load, by name.
    pub only: Option<String>,
    /// Rounds, each with every case.
    pub rounds: u32,
    /// Warm-up of each load in milliseconds, which is not measured.
    pub ramp_ms: u32,
    /// Measured time of each load in milliseconds.
    pub time_ms: u32,
    /// Run every case once as a warm-up.
    pub thorough: bool,
}

impl Plan {
    /// The loads to measure.
    pub fn cells(&self) -> Vec<&'static Cell> {
        let wanted = |cell: &&Cell| self.only.as_ref().is_none_or(|only| only == cell.name);
        CELLS.iter().filter(wanted).collect()
    }

    /// The measurement in machines whose clock counts instructions, each load in one of its own: the longer a machine
    /// runs, the likelier it hangs.
    pub fn counted_job(&self) -> CountedJob<Self> {
        let one = |case: Case, cell: &Cell| Self {
            sources: self.sources.counted(),
            cases: vec![case],
            only: Some(cell.name.to_owned()),
            rounds: 1,
            thorough: false,
            ..*self
        };
        CountedJob {
            bench: "net",
            files: self.sources.files().collect(),
            system: CountedMachine::with_network,
            rounds: self.rounds,
            plans: plans(&self.cases, &self.cells(), one),
        }
    }
}

/// Program that sends and receives, in the guest and on this machine.
pub const NETLOAD: &str = "husk-netload";

/// Time limit until user space runs.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time of a load in addition to its duration.
const CELL_TIMEOUT: Duration = Duration::from_secs(15);
/// Number of runs that may fail.
const SPARE: u32 = 3;

/// Runs the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = bench_files::folder()?;
    let bench = Bench::new(plan, folder.path())?;
    let (cases, absent): (Vec<Case>, Vec<Case>) = plan.cases.iter().partition(|case| case.absent().is_none());
    let left_out = absent.iter().map(|case| (case.name(), case.absent()));
    let facts = [
        ("vcpus", json!(VCPUS)),
        ("memory_mib", json!(MEMORY_MIB)),
        ("command_line", json!(SCRIPT)),
        ("ramp_ms", json!(plan.ramp_ms)),
        ("time_ms", json!(plan.time_ms)),
        (
            "loads",
            json!(cell::loads(&plan.cells(), plan.ramp_ms, plan.time_ms)),
        ),
        ("left_out", json!(left_out.collect::<Vec<_>>())),
    ];
    message::env(host::facts(&bench.files.husk)?, facts);
    ensure!(!cases.is_empty(), "none of the cases can be measured here");

    let attempts = Attempts::new(SPARE);
    if plan.thorough {
        attempts.warm_up(&cases, |case| bench.measure(case, None))?;
    }
    attempts.rounds(&cases, plan.rounds, |case, round| {
        bench.measure(case, Some(round))
    })
}

struct Bench<'a> {
    plan: &'a Plan,
    files: BenchFiles,
}

impl<'a> Bench<'a> {
    fn new(plan: &'a Plan, folder: &Path) -> Result<Self> {
        let files = BenchFiles::gather(&plan.sources, folder)?;
        let addresses = wire::addresses();
        let loads = cell::loads(&plan.cells(), plan.ramp_ms, plan.time_ms);
        files.pack_program(
            NETLOAD,
            &[
                ("script", include_bytes!("guest.sh")),
                ("loads", loads.as_bytes()),
                ("net", addresses.as_bytes()),
            ],
        )?;
        Ok(Self { plan, files })
    }

    /// Runs all loads in one guest. Its values are reported at the end, all or none.
    fn measure(&self, case: Case, round: Option<u32>) -> Result<()> {
        let wire = Wire::new()?;
        if !case.makes_bridge() {
            wire.bridge()?;
        }
        let _peer = wire.serve(&self.files.folder.join(NETLOAD))?;
        let time = Duration::from_millis((self.plan.ramp_ms + self.plan.time_ms).into());
        let timeout = TIMEOUT + (time + CELL_TIMEOUT) * u32::try_from(self.plan.cells().len())?;
        let mut started = Started::start(case.ready(&self.files)?, timeout)?;
        let mut values = Vec::new();
        for cell in self.plan.cells() {
            values.extend(self.load(cell, case, &mut started)?);
        }
        started.until_script("husk-bench: done;")?;
        started.ended()?;
        if let Some(round) = round {
            message::values("net", case.name(), round, values);
        }
        Ok(())
    }

    /// The values of a load.
    fn load(
        &self,
        cell: &Cell,
        case: Case,
        started: &mut Started,
    ) -> Result<Vec<(String, &'static str, f64)>> {
        let counts = started.until_script(&cell.begins())? + Duration::from_millis(self.plan.ramp_ms.into());
        message::news(format!("{}: {}", case.name(), cell.title));
        let helped = started.group.has_thread("vhost-")?;
        ensure!(helped == case.vhost(), "vhost works for it: {helped}");
        let cost = Cost::between(
            started,
            counts,
            counts + Duration::from_millis(self.plan.time_ms.into()),
        )?;
        started.until_script(&cell.ends())?;
        started.until_script(";")?;
        let told = started.serial.said();
        let told = told.trim().parse();
        Ok(figures(cell, told.context("not a number")?, cost))
    }
}

/// The values of a load from the guest's output and the cost: metric, unit, value.
fn figures(cell: &Cell, told: f64, cost: Cost) -> Vec<(String, &'static str, f64)> {
    let pieces = cell.pieces(told);
    let mut figures = vec![
        (cell.metric.to_owned(), cell.unit(), cell.rate(told)),
        (format!("cpu_us_{}", cell.name), "us", cost.all * 1e6 / pieces),
        (
            format!("cpu_guest_us_{}", cell.name),
            "us",
            cost.guest * 1e6 / pieces,
        ),
    ];
    if let Some(exits) = cost.exits {
        figures.push((format!("kvm_exits_{}", cell.name), "count", exits / pieces));
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cells_figures_have_names_of_their_own() {
        let cost = Cost {
            all: 1.5,
            guest: 1.0,
            exits: Some(3000.0),
        };
        let values = figures(&CELLS[6], 1000.0, cost);
        let wanted = [
            ("round_trips_s", "1/s", 1000.0),
            ("cpu_us_tcp_rr", "us", 1500.0),
            ("cpu_guest_us_tcp_rr", "us", 1000.0),
            ("kvm_exits_tcp_rr", "count", 3.0),
        ];
        let wanted = wanted.map(|(metric, unit, value)| (metric.to_owned(), unit, value));
        assert_eq!(values, wanted);
        // For a stream, the cost of one MiB.
        let values = figures(&CELLS[0], f64::from(100 << 20), cost);
        assert_eq!(values[0].0, "mbit_s_tcp_out");
        assert_eq!(values[1].2, 15_000.0);
    }
}
