//! `cargo xtask bench cluster`: Husk under KubeVirt's stock control plane, with many VMIs on played nodes.

mod audit;
mod played;
mod report;

use super::host;
use super::record::{Measurement, Record};
use super::svg::Better;
use crate::binaries::{self, Profile};
use crate::cluster::{self, Kubectl, Options};
use crate::progress::Progress;
use anyhow::{Result, bail};
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `cargo xtask bench cluster`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A checkout of KubeVirt 1.9, from which its control plane is built
    #[arg(long, value_name = "CHECKOUT")]
    kubevirt: PathBuf,
    /// Number of VMIs; up to 100 of them are on the first node
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=2000))]
    vmis: u32,
    /// Number of nodes, each with an agent
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=50))]
    nodes: u32,
    /// Seconds in which the idle agents are measured
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    idle: u64,
    /// Use Husk's existing binaries
    #[arg(long)]
    no_build: bool,
}

/// Runs `cargo xtask bench cluster`.
pub fn run(args: Args) -> Result<()> {
    cluster::need_root(&format!("bench cluster --kubevirt {}", args.kubevirt.display()))?;
    if cluster::exists() {
        bail!("there is a cluster: end it by cargo xtask cluster down");
    }
    let progress = Progress::new();
    if !args.no_build {
        binaries::build(Profile::Release, &progress)?;
    }
    let mut record = Record::default();
    record.env = host::facts(&Profile::Release.folder().join("husk"))?;
    for (name, value) in [("vmis", args.vmis), ("nodes", args.nodes)] {
        record.env.insert(name.to_owned(), json!(value));
    }
    record.env.insert("where".to_owned(), json!("native"));
    record.env.insert("load_before".to_owned(), json!(host::load()));
    let options = Options {
        nodes: 0,
        profile: Profile::Release,
        build: false,
    };
    cluster::up(&args.kubevirt, &options)?;
    let plan = played::Plan {
        vmis: args.vmis,
        nodes: args.nodes,
        idle: Duration::from_secs(args.idle),
    };
    let measured = cluster::folder()
        .and_then(|folder| played::run(&plan, &progress, &Kubectl::new(&folder), &mut record));
    record.env.insert("load_after".to_owned(), json!(host::load()));
    let ended = cluster::down();
    println!("{}", report::text(&record));
    let setting = report::setting(&record);
    record.publish("cluster", &setting, Better::Less, &report::plot(&record))?;
    measured.and(ended)
}

/// Adds a value to the record.
fn measured(record: &mut Record, case: &str, metric: &str, unit: &str, value: f64) {
    record.measurements.push(Measurement {
        bench: "cluster".to_owned(),
        case: case.to_owned(),
        metric: metric.to_owned(),
        unit: unit.to_owned(),
        value,
        run: 1,
    });
}
