//! `cargo xtask bench net`: streams, packets and round trips between a guest and a peer, compared with QEMU.

mod case;
mod cell;
pub mod inside;
mod report;
mod wire;

use super::bench_files::Sources;
use super::cases;
use super::guest::FLOOR_PROGRAM;
use super::measure::{self, Job};
use super::peers::Peers;
use super::record::{self, Record};
use super::svg::Better;
use anyhow::Result;
pub use case::Case;
use cell::CELLS;
use inside::{NETLOAD, Plan};
use std::time::Duration;
use xtask::packages::{Tool, tool};
use xtask::progress::Progress;

/// Arguments of `cargo xtask bench net`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of all cases; at least ten are needed to compare two cases [default: 10; with --icount, 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Measure only this case; may be given several times
    #[arg(long, value_enum, value_name = "CASE")]
    only: Vec<Case>,
    /// Measure only this load
    #[arg(long, value_name = "LOAD", value_parser = CELLS.iter().map(|cell| cell.name).collect::<Vec<_>>())]
    load: Option<String>,
    /// Count instructions in place of time, in a machine for each case: the load of this machine has no influence
    #[arg(long)]
    icount: bool,
    /// Also measure the least program that moves frames in user space
    #[arg(long)]
    floor: bool,
    #[command(flatten)]
    peers: Peers,
    /// One short round without warm-up, which only shows that the benchmark works
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
}

/// Image of the guest.
const IMAGE: &str = "initramfs-6.12-network";

/// Maximum time of a case in one round, on any machine.
const CASE_LIMIT: Duration = Duration::from_secs(240);

/// Commands that set up the network.
const TOOLS: [Tool; 2] = [tool("ip", "iproute2"), tool("ethtool", "ethtool")];

/// Runs `cargo xtask bench net`.
pub fn run(args: Args) -> Result<()> {
    let mut cases = cases::chosen(&args.only, &args.peers)?;
    let progress = Progress::on_stderr();
    let [ip, ethtool] = TOOLS;
    measure::prepare(&progress, &[IMAGE], &[measure::QEMU, ip, ethtool])?;
    cases.retain(|case| *case != Case::Floor || args.floor || args.only.contains(case));
    let mut programs = vec![NETLOAD];
    programs.extend(cases.contains(&Case::Floor).then_some(FLOOR_PROGRAM));
    let mut sources = Sources::new(IMAGE, "vmlinux", &programs)?;
    sources.peers = args.peers.staged()?;
    let (ramp_ms, time_ms) = match (args.icount, args.quick) {
        (true, _) => (100, 400),
        (false, true) => (200, 1000),
        (false, false) => (1000, 2500),
    };
    let rounds = args.rounds.unwrap_or(if args.icount { 1 } else { 10 });
    let plan = Plan {
        sources,
        cases,
        only: args.load.clone(),
        rounds: if args.quick { 1 } else { rounds },
        ramp_ms,
        time_ms,
        thorough: !args.quick,
    };
    let mut record = Record::default();
    record.note("guest", IMAGE);
    let measured = if args.icount {
        plan.counted_job().measure(&progress, &mut record)
    } else {
        let starts = (plan.rounds + 1) * u32::try_from(plan.cases.len())?;
        let job = Job {
            bench: "net",
            limit: CASE_LIMIT * starts,
            plan,
            in_lab: false,
        };
        job.measure(&progress, &mut record, |(), _| {})
    };
    // Also record a benchmark that ended early: its values are valid.
    println!("{}", report::text(&record));
    let is_partial = args.quick || !args.only.is_empty() || args.load.is_some();
    let name = record::name("net", &[("icount", args.icount), ("quick", is_partial)]);
    let setting = report::setting(&record);
    record.publish(&name, &setting, Better::More, &report::plot(&record))?;
    measured
}
