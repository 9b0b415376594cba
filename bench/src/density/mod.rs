//! `cargo xtask bench density`: how fast many VMs start, how much memory idle ones need and how often they exit.

mod case;
mod halted;
pub mod inside;
mod report;

use super::bench_files::{Sources, keep};
use super::guest::FLOOR_PROGRAM;
use super::measure::{self, Job};
use super::peers::Peers;
use super::record::{self, Record};
use super::svg::Better;
use super::vmm::Vmm;
use anyhow::Result;
use inside::Plan;
use std::time::Duration;
use xtask::progress::Progress;

/// Arguments of `cargo xtask bench density`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of all cases
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Guests that start at once, and then are idle
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    vms: u32,
    /// Measure one part only
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Measure starts only, and count instructions in place of time: the load of this machine has no influence
    #[arg(long, conflicts_with = "only")]
    icount: bool,
    /// Also measure the least program that boots the kernel
    #[arg(long)]
    floor: bool,
    #[command(flatten)]
    peers: Peers,
    /// One short round, which only shows that the benchmark works
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Starts a second
    Starts,
    /// Memory and exits of idle guests
    Idle,
}

const IMAGE: &str = "initramfs-6.1";
/// Time until guests are idle.
const SETTLE: Duration = Duration::from_secs(30);
/// Time in which exits are counted.
const COUNTED: Duration = Duration::from_secs(30);
/// The same of a short round.
const QUICK: Duration = Duration::from_secs(5);
/// Maximum time of a round of one case and one of its guests, beside these.
const GUEST_LIMIT: Duration = Duration::from_secs(60);

/// Runs `cargo xtask bench density`.
pub fn run(args: Args) -> Result<()> {
    let progress = Progress::on_stderr();
    measure::prepare(&progress, &[IMAGE], &[measure::QEMU])?;
    let mut sources = Sources::new(IMAGE, "vmlinux", if args.floor { &[FLOOR_PROGRAM] } else { &[] })?;
    sources.peers = args.peers.staged()?;
    let mut kernel = std::fs::read(&sources.kernel)?;
    let entries = halted::halt(&mut kernel)?;
    let mut cases = Vmm::ALL.to_vec();
    cases.retain(|case| *case != Vmm::Microvm && case.asked_for(&args.peers, args.floor));
    let time = |long| if args.quick { QUICK } else { long };
    let plan = Plan {
        sources,
        halted: keep("vmlinux-halted", &kernel)?,
        entries,
        cases,
        rounds: if args.quick { 1 } else { args.rounds },
        vms: args.vms,
        settle: time(SETTLE),
        counted: time(COUNTED),
        starts: args.only != Some(Part::Idle),
        idle: args.only != Some(Part::Starts) && !args.icount,
        thorough: !args.quick,
    };
    let cases = plan.cases.clone();
    let mut record = Record::default();
    let measured = if args.icount {
        plan.counted_job().measure(&progress, &mut record)
    } else {
        let guests = GUEST_LIMIT * plan.vms * 2 + plan.settle + plan.counted;
        let job = Job {
            bench: "density",
            limit: guests * u32::try_from(cases.len())? * (plan.rounds + 1),
            plan,
            in_lab: false,
        };
        job.measure(&progress, &mut record, |(), _| {})
    };
    // Also record a benchmark that ended early: its values are valid.
    println!("{}", report::text(&record, &cases));
    let words = [
        ("icount", args.icount),
        ("quick", args.quick || args.only.is_some()),
    ];
    let name = record::name("density", &words);
    let setting = report::setting(&record);
    record.publish(&name, &setting, Better::Less, &report::plot(&record, &cases))?;
    measured
}
