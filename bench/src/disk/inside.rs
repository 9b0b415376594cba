//! The process that runs where KVM is: starts guests, one at a time, and reports the measured values.

use super::case::{CACHE, Case, DiskFiles, MEMORY_MIB};
use super::cell::{self, CELLS, Cell};
use super::fio;
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
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use xtask::finish::finish;
use xtask::lab::counted::CountedMachine;

/// Cases and parameters of a measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Files of all guests; the initrd has fio.
    pub sources: Sources,
    /// Cases to compare.
    pub cases: Vec<Case>,
    /// Only this kind of requests, by name.
    pub only: Option<String>,
    /// Size of the disk, which is read into the host's page cache before each start.
    pub disk_mib: u32,
    /// Rounds, each with every case.
    pub rounds: u32,
    /// Warm-up of each kind of request in milliseconds, which is not measured.
    pub ramp_ms: u32,
    /// Measured time of each kind of request in milliseconds.
    pub time_ms: u32,
    /// Run every case once as a warm-up.
    pub thorough: bool,
}

impl Plan {
    /// The kinds of requests to measure.
    pub fn cells(&self) -> Vec<&'static Cell> {
        let wanted = |cell: &&Cell| self.only.as_ref().is_none_or(|only| only == cell.name);
        CELLS.iter().filter(wanted).collect()
    }

    /// The measurement in machines whose clock counts instructions, each kind of requests in one of its own: the longer
    /// a machine runs, the likelier it hangs.
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
            bench: "disk",
            files: self.sources.files().collect(),
            system: CountedMachine::with_file_system,
            rounds: self.rounds,
            plans: plans(&self.cases, &self.cells(), one),
        }
    }
}

/// Time limit until user space runs and fio has loaded its sixty libraries.
const TIMEOUT: Duration = Duration::from_secs(180);
/// Maximum time of a cell in addition to its duration.
const CELL_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of runs that may fail.
const SPARE: u32 = 3;

/// Runs the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let folder = bench_files::folder()?;
    message::news("making the disk".to_owned());
    let files = DiskFiles::gather(plan, folder.path())?;
    let facts = [
        ("vcpus", json!(files.vcpus)),
        ("memory_mib", json!(MEMORY_MIB)),
        ("command_line", json!(SCRIPT)),
        ("disk_mib", json!(plan.disk_mib)),
        ("cache", json!(CACHE)),
        ("ramp_ms", json!(plan.ramp_ms)),
        ("time_ms", json!(plan.time_ms)),
        (
            "jobs",
            json!(cell::jobs(&plan.cells(), plan.ramp_ms, plan.time_ms)),
        ),
    ];
    message::env(host::facts(&files.common.husk)?, facts);
    ensure!(!plan.cases.is_empty(), "none of the cases can be measured here");

    let bench = Bench { plan, files };
    let attempts = Attempts::new(SPARE);
    if plan.thorough {
        attempts.warm_up(&plan.cases, |case| bench.measure(case, None))?;
    }
    attempts.rounds(&plan.cases, plan.rounds, |case, round| {
        bench.measure(case, Some(round))
    })
}

struct Bench<'a> {
    plan: &'a Plan,
    files: DiskFiles,
}

impl Bench<'_> {
    /// Runs all kinds of requests in one guest. Its values are reported at the end, all or none.
    fn measure(&self, case: Case, run: Option<u32>) -> Result<()> {
        let plan = self.plan;
        self.files.warm(case)?;
        let time = Duration::from_millis((plan.ramp_ms + plan.time_ms).into());
        let cells = plan.cells();
        let timeout = TIMEOUT + (time + CELL_TIMEOUT) * u32::try_from(cells.len())?;
        let mut started = Started::start(case.ready(&self.files)?, timeout)?;
        started.until_script("husk-bench: disk ")?;
        let said = started.serial.said();
        started.until_script(";")?;
        let disk = started.serial.said();
        let sectors = disk.split(' ').nth(1).and_then(|word| word.parse().ok());
        ensure!(
            sectors == Some(plan.disk_mib * 2048),
            "the guest has another disk: {disk}\n{said}"
        );
        let mut costs = Vec::new();
        for cell in &cells {
            let began = started.until_script(&cell::begins(cell))?;
            message::news(format!("{}: {}", case.name(), cell.title));
            let counts = began + Duration::from_millis(plan.ramp_ms.into());
            let end = counts + Duration::from_millis(plan.time_ms.into());
            costs.push(Cost::between(&started, counts, end)?);
        }
        started.until_script("husk-bench: done;")?;
        let said = started.serial.said();
        started.ended()?;
        let lines = said
            .lines()
            .filter_map(|line| line.strip_prefix("husk-bench: result "));
        let lines: Vec<&str> = lines.collect();
        ensure!(
            lines.len() == cells.len(),
            "{} results of {}:\n{said}",
            lines.len(),
            cells.len()
        );
        let mut values = Vec::new();
        for ((cell, line), cost) in cells.iter().zip(lines).zip(costs) {
            values.extend(figures(cell, line, cost)?);
        }
        if let Some(run) = run {
            message::values("disk", case.name(), run, values);
        }
        Ok(())
    }
}

/// The values of a kind of request from fio's line and the cost: metric, unit, value.
fn figures(cell: &Cell, line: &str, cost: Cost) -> Result<Vec<(String, &'static str, f64)>> {
    let job = fio::job(line, cell.writes())?;
    ensure!(job.name == cell.name, "{} instead of {}", job.name, cell.name);
    let rate = if cell.streams() {
        job.bytes_s / f64::from(1 << 20)
    } else {
        job.iops
    };
    Ok(vec![
        (cell.rate(), cell.unit(), rate),
        (format!("lat_p50_us_{}", cell.name), "us", job.p50_us),
        (format!("lat_p99_us_{}", cell.name), "us", job.p99_us),
        (format!("cpu_us_{}", cell.name), "us", cost.all * 1e6 / job.iops),
        (
            format!("cpu_guest_us_{}", cell.name),
            "us",
            cost.guest * 1e6 / job.iops,
        ),
    ])
}

impl DiskFiles {
    /// Adds the jobs to the initrd, and makes the disk.
    fn gather(plan: &Plan, folder: &Path) -> Result<Self> {
        let common = BenchFiles::gather(&plan.sources, folder)?;
        let jobs = cell::jobs(&plan.cells(), plan.ramp_ms, plan.time_ms);
        common.pack(&[
            ("script", include_bytes!("guest.sh")),
            ("jobs", jobs.as_bytes()),
            ("mark", cell::MARK.as_bytes()),
        ])?;
        let raw = folder.join("data.img");
        fill(&raw, plan.disk_mib)?;
        let qcow2 = if plan.cases.iter().any(|case| case.is_qcow2()) {
            let qcow2 = folder.join("data.qcow2");
            let mut convert = Command::new("qemu-img");
            convert
                .args(["convert", "-f", "raw", "-O", "qcow2"])
                .arg(&raw)
                .arg(&qcow2);
            finish(&mut convert)?;
            Some(qcow2)
        } else {
            None
        };
        // One processor is left for the VMM; more than four would only wait for each other.
        let cpus = std::thread::available_parallelism()?.get();
        Ok(Self {
            common,
            raw,
            qcow2,
            vcpus: u32::try_from((cpus / 2).clamp(1, 4))?,
        })
    }

    /// Flushes the writes of the last case, and reads the disk of `case` into the page cache.
    fn warm(&self, case: Case) -> Result<()> {
        let image = match &self.qcow2 {
            Some(qcow2) if case.is_qcow2() => qcow2,
            _ => &self.raw,
        };
        let mut file = File::open(image).with_context(|| format!("cannot open {}", image.display()))?;
        file.sync_all()?;
        let mut buffer = vec![0; 1 << 20];
        while file.read(&mut buffer)? > 0 {}
        Ok(())
    }
}

/// Makes the disk's image, without holes and repeated parts.
fn fill(path: &Path, mib: u32) -> Result<()> {
    let mut file = File::create_new(path).with_context(|| format!("cannot make {}", path.display()))?;
    let mut random = fastrand::Rng::with_seed(1);
    let mut piece = vec![0; 1 << 20];
    for _ in 0..mib {
        random.fill(&mut piece);
        file.write_all(&piece)?;
    }
    file.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "3;fio-3.39;rand4k_qd1;0;0;146072;72999;20000;2001;1;4619;13.6;56.2;0;13458;40.5;191.7;50.000000%=33;99.000000%=164";

    #[test]
    fn a_cells_figures_have_names_of_their_own() {
        let line = format!("{LINE}{}", ";0%=0".repeat(80));
        let cost = Cost {
            all: 1.5,
            guest: 1.0,
            exits: None,
        };
        let values = figures(&CELLS[0], &line, cost).expect("figures");
        let wanted = [
            ("iops_rand4k_qd1", "1/s", 20_000.0),
            ("lat_p50_us_rand4k_qd1", "us", 33.0),
            ("lat_p99_us_rand4k_qd1", "us", 164.0),
            // 1.5 seconds of CPU time per second, for 20,000 requests.
            ("cpu_us_rand4k_qd1", "us", 75.0),
            ("cpu_guest_us_rand4k_qd1", "us", 50.0),
        ];
        let wanted = wanted.map(|(metric, unit, value)| (metric.to_owned(), unit, value));
        assert_eq!(values, wanted);
        // The line of another job does not match.
        assert!(figures(&CELLS[1], &line, cost).is_err());
    }
}
