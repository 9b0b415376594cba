//! Benchmarks: most compare Husk with QEMU.

pub mod archive;
mod bench_files;
mod boot;
mod cluster;
mod cost;
mod disk;
mod figures;
mod group;
mod guest;
mod host;
mod hotplug;
mod idle;
mod kvm;
mod limits;
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
mod vmlinux;

use anyhow::Result;
use clap::Subcommand;

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Time from a VMM's start to its guest's user space, and its cost
    Boot(boot::Args),
    /// Where the time of a start goes under KubeVirt's control plane, and what many VMIs cost; needs root
    Cluster(cluster::Args),
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
}

/// Runs `cargo xtask bench`.
pub fn run(args: Args) -> Result<()> {
    match args.what {
        What::Boot(args) => boot::run(args),
        What::Cluster(args) => cluster::run(args),
        What::Disk(args) => disk::run(args),
        What::Hotplug(args) => hotplug::run(args),
        What::Idle(args) => idle::run(args),
        What::Net(args) => net::run(args),
        What::Pod(args) => pod::run(args),
        What::Pull(args) => pull::run(args),
        What::Snapshot(args) => snapshot::run(args),
    }
}
