//! The process that runs where KVM is: starts guests, one at a time, and reports the measured values.

use super::case::{APPEND, Case, MEMORY_MIB, VCPUS};
use super::cell::{self, CELLS, Cell};
use super::wire::{self, Wire};
use crate::bench_files::{self, BenchFiles};
use crate::cost::Cost;
use crate::peers::Peers;
use crate::record::Measurement;
use crate::rounds::{Attempts, rotated};
use crate::started::Started;
use crate::{host, message};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Cases and parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Folder of Husk's programs and `husk-netload`.
    pub release: PathBuf,
    /// Kernel of all guests.
    pub kernel: PathBuf,
    /// Initrd of all guests.
    pub initrd: PathBuf,
    /// Cases to compare.
    pub cases: Vec<Case>,
    /// Only this load, by name.
    pub only: Option<String>,
    /// Other VMMs.
    pub peers: Peers,
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
}

/// Time limit until user space runs.
const PATIENCE: Duration = Duration::from_secs(120);
/// Maximum time of a load in addition to its duration.
const CELL_PATIENCE: Duration = Duration::from_secs(15);
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
        ("command_line", json!(APPEND)),
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
        for case in &cases {
            attempts.run(case.name(), "warming up", || bench.measure(*case, None))?;
        }
    }
    for round in 1..=plan.rounds {
        for case in rotated(&cases, round) {
            let what = format!("round {round} of {}", plan.rounds);
            attempts.run(case.name(), &what, || bench.measure(case, Some(round)))?;
        }
    }
    Ok(())
}

struct Bench<'a> {
    plan: &'a Plan,
    files: BenchFiles,
    peers: Peers,
    netload: PathBuf,
}

impl<'a> Bench<'a> {
    fn new(plan: &'a Plan, folder: &Path) -> Result<Self> {
        let files = BenchFiles::gather(&plan.release, &plan.kernel, &plan.initrd, folder)?;
        let netload = files.add(&plan.release.join("husk-netload"))?;
        files.pack(&[
            ("script", include_bytes!("guest.sh")),
            ("husk-netload", &std::fs::read(&netload)?),
            (
                "loads",
                cell::loads(&plan.cells(), plan.ramp_ms, plan.time_ms).as_bytes(),
            ),
            ("net", wire::addresses().as_bytes()),
        ])?;
        Ok(Self {
            plan,
            peers: plan.peers.gathered(&files)?,
            files,
            netload,
        })
    }

    /// Runs all loads in one guest. Its values are reported at the end, all or none.
    fn measure(&self, case: Case, round: Option<u32>) -> Result<()> {
        let wire = Wire::new()?;
        if !case.makes_bridge() {
            wire.bridge()?;
        }
        let _peer = wire.serve(&self.netload)?;
        let time = Duration::from_millis((self.plan.ramp_ms + self.plan.time_ms).into());
        let patience = PATIENCE + (time + CELL_PATIENCE) * u32::try_from(self.plan.cells().len())?;
        let mut started = Started::start(case.ready(&self.files, &self.peers)?, patience)?;
        let mut values = Vec::new();
        for cell in self.plan.cells() {
            values.extend(self.load(cell, case, &mut started)?);
        }
        until(&mut started, "husk-bench: done;")?;
        started.ended()?;
        for (metric, unit, value) in values.into_iter().filter(|_| round.is_some()) {
            message::measured(Measurement {
                bench: "net".to_owned(),
                case: case.name().to_owned(),
                metric,
                unit: unit.to_owned(),
                value,
                run: round.unwrap_or_default(),
            });
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
        let counts = until(started, &cell.begins())? + Duration::from_millis(self.plan.ramp_ms.into());
        message::news(format!("{}: {}", case.name(), cell.title));
        let helped = started.group.has_thread("vhost-")?;
        ensure!(helped == case.vhost(), "vhost works for it: {helped}");
        let cost = Cost::between(
            started,
            counts,
            counts + Duration::from_millis(self.plan.time_ms.into()),
        )?;
        until(started, &cell.ends())?;
        until(started, ";")?;
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

/// Waits until the guest prints `words`.
fn until(started: &mut Started, words: &str) -> Result<Instant> {
    match started.first_of(&[words, "husk-bench: failed;"])? {
        (0, when) => Ok(when),
        _ => bail!("the guest cannot measure: {}", started.serial.said()),
    }
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
