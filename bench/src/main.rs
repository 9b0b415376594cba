//! The benchmarks of `cargo xtask bench`: most compare Husk with QEMU.
//!
//! They are a program of their own because they speak gRPC, whose crates `cargo xtask` would otherwise compile first.

mod bench_files;
mod boot;
mod cases;
mod cluster;
mod cost;
mod counted;
mod density;
mod disk;
mod figures;
mod group;
mod guest;
mod host;
mod hotplug;
mod idle;
mod kvm;
mod limits;
mod line;
mod measure;
mod message;
mod monitor;
mod net;
mod peers;
mod pod;
mod pull;
mod qmp;
mod record;
mod rounds;
mod smaps;
mod snapshot;
mod started;
mod stats;
mod svg;
mod table;
mod targets;
mod trace;
mod vmm;

use anyhow::{Result, bail};
use clap::Parser;
use std::process::ExitCode;

/// Measures Husk, mostly in comparison with QEMU.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask bench",
    bin_name = "cargo xtask bench",
    version,
    arg_required_else_help = true
)]
enum Bench {
    /// Time from a VMM's start to its guest's user space, and its cost
    Boot(boot::Args),
    /// Where the time of a start goes under KubeVirt's control plane, and what many VMIs cost; needs root
    Cluster(cluster::Args),
    /// Starts per second, and what idle guests cost
    Density(density::Args),
    /// Several kinds of requests to one disk
    Disk(disk::Args),
    /// Time from the request for another disk to the guest's event
    Hotplug(hotplug::Args),
    /// VM exits and memory that the guest agent adds to an idle guest
    Idle(idle::Args),
    /// Streams, packets and round trips between a guest and a peer
    Net(net::Args),
    /// Time from `ctr run` to a guest's user space, and the cost of the whole pod
    Pod(pod::Args),
    /// Time to pull an image of 1 GiB and to unpack it
    Pull(pull::Args),
    /// Time to save a guest and until a restored one answers, and the memory of its clones
    Snapshot(snapshot::Args),
    /// Measures a plan on this machine: a benchmark runs itself this way where KVM is
    #[command(hide = true)]
    Inside {
        /// Name of the benchmark
        bench: String,
        /// Its plan, as JSON
        plan: String,
    },
}

fn main() -> ExitCode {
    match run(Bench::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(bench: Bench) -> Result<()> {
    match bench {
        Bench::Boot(args) => boot::run(args),
        Bench::Cluster(args) => cluster::run(args),
        Bench::Density(args) => density::run(args),
        Bench::Disk(args) => disk::run(args),
        Bench::Hotplug(args) => hotplug::run(args),
        Bench::Idle(args) => idle::run(args),
        Bench::Net(args) => net::run(args),
        Bench::Pod(args) => pod::run(args),
        Bench::Pull(args) => pull::run(args),
        Bench::Snapshot(args) => snapshot::run(args),
        Bench::Inside { bench, plan } => inside(&bench, &plan),
    }
}

fn inside(bench: &str, plan: &str) -> Result<()> {
    match bench {
        "boot" => boot::inside::run(&serde_json::from_str(plan)?),
        "density" => density::inside::run(&serde_json::from_str(plan)?),
        "disk" => disk::inside::run(&serde_json::from_str(plan)?),
        "hotplug" => hotplug::inside::run(&serde_json::from_str(plan)?),
        "idle" => idle::inside::run(&serde_json::from_str(plan)?),
        "net" => net::inside::run(&serde_json::from_str(plan)?),
        "pod" => pod::inside::run(&serde_json::from_str(plan)?),
        "pull" => pull::inside::run(&serde_json::from_str(plan)?),
        "snapshot" => snapshot::inside::run(&serde_json::from_str(plan)?),
        _ => bail!("no plan is for {bench}"),
    }
}
