//! `cargo xtask bench cluster`: Husk under KubeVirt's stock control plane: where the time of a start goes, and what
//! many VMIs cost.

mod audit;
mod played;
mod report;
mod start;

use super::host;
use super::record::{Record, measurements};
use super::svg::Better;
use anyhow::{Result, bail};
use std::path::PathBuf;
use std::time::Duration;
use xtask::binaries::{self, Profile};
use xtask::cluster::{self, Kubectl, Options};
use xtask::progress::Progress;

/// Arguments of `cargo xtask bench cluster`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A checkout of KubeVirt 1.9, from which its control plane is built
    #[arg(long, value_name = "CHECKOUT")]
    kubevirt: PathBuf,
    /// Measure only this
    #[arg(long, value_name = "WHAT")]
    only: Option<Part>,
    /// Rounds of starts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of VMIs on played nodes; up to 100 of them are on the first node
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=2000))]
    vmis: u32,
    /// Number of played nodes, each with an agent
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=50))]
    nodes: u32,
    /// Seconds in which the idle agents are measured
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    idle: u64,
    /// Use Husk's existing binaries
    #[arg(long)]
    no_build: bool,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// From `kubectl apply` to the guest's user space, on a node in the lab
    Start,
    /// Agents and API requests of many VMIs, on played nodes
    Many,
}

/// Runs `cargo xtask bench cluster`.
pub fn run(args: Args) -> Result<()> {
    cluster::need_root(&format!("bench cluster --kubevirt {}", args.kubevirt.display()))?;
    if cluster::exists() {
        bail!("there is a cluster: end it by cargo xtask cluster down");
    }
    let progress = Progress::on_stderr();
    if !args.no_build {
        binaries::build(Profile::Release, &progress)?;
    }
    let mut record = Record {
        env: host::facts(&Profile::Release.folder().join("husk"))?,
        ..Record::default()
    };
    let done = |part: Part| args.only.is_none_or(|only| only == part);
    let measured = record.measure("native, starts in the lab", |record| {
        if done(Part::Start) {
            with_cluster(&args, 1, |kubectl| {
                start::run(args.rounds, &progress, kubectl, record)
            })?;
        }
        if done(Part::Many) {
            record.note("vmis", args.vmis);
            record.note("nodes", args.nodes);
            let plan = played::Plan {
                vmis: args.vmis,
                nodes: args.nodes,
                idle: Duration::from_secs(args.idle),
            };
            with_cluster(&args, 0, |kubectl| played::run(&plan, &progress, kubectl, record))?;
        }
        Ok(())
    });
    if record.measurements.is_empty() {
        return measured;
    }
    // Also record a benchmark that ended early: its values are valid.
    println!("{}", report::text(&record));
    let setting = report::setting(&record);
    // A part does not replace a measurement of both.
    let name = match args.only {
        None => "cluster",
        Some(Part::Start) => "cluster-start",
        Some(Part::Many) => "cluster-many",
    };
    record.publish(name, &setting, Better::Less, &report::plot(&record))?;
    measured
}

/// Runs `work` in a cluster with `nodes` nodes in the lab, and ends the cluster.
fn with_cluster(args: &Args, nodes: u32, work: impl FnOnce(&Kubectl) -> Result<()>) -> Result<()> {
    let options = Options {
        nodes,
        profile: Profile::Release,
        build: false,
    };
    let worked = cluster::up(&args.kubevirt, &options)
        .and_then(|()| cluster::folder())
        .and_then(|folder| work(&Kubectl::new(&folder)));
    // Without processes nothing was started.
    let ended = match cluster::exists() {
        true => cluster::down(),
        false => Ok(()),
    };
    worked.and(ended)
}

/// Adds values of a case in a round to the record, from metric, unit and value of each.
fn add<M: Into<String>>(
    record: &mut Record,
    case: &str,
    run: u32,
    values: impl IntoIterator<Item = (M, &'static str, f64)>,
) {
    let values = measurements("cluster", case, run, values);
    record.measurements.extend(values);
}
