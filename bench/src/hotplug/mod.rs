//! `cargo xtask bench hotplug`: the time from the request for another disk to the guest's event, compared with QEMU.

mod case;
mod console_trace;
pub mod inside;
mod pod;
mod report;

use super::bench_files::Sources;
use super::cases;
use super::measure::{self, Job};
use super::peers::Peers;
use super::record::{self, Record};
use super::svg::Better;
use anyhow::Result;
pub use case::Case;
use inside::{Plan, UEVENTS};
use std::time::Duration;
use xtask::progress::Progress;

/// Arguments of `cargo xtask bench hotplug`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of all cases; at least five are needed to compare two cases [default: 5; with --icount, 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Measure only this case; may be given several times
    #[arg(long, value_enum, value_name = "CASE")]
    only: Vec<Case>,
    /// Count instructions in place of time, in a machine for each case: the load of this machine has no influence
    #[arg(long)]
    icount: bool,
    /// One round of few additions, which only shows that the benchmark works
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
}

/// Image of the guest.
const IMAGE: &str = "initramfs-6.12";

/// Maximum time of a case in one round, on any machine.
const CASE_LIMIT: Duration = Duration::from_secs(400);

/// Runs `cargo xtask bench hotplug`.
pub fn run(args: Args) -> Result<()> {
    let progress = Progress::on_stderr();
    measure::prepare(&progress, &[IMAGE], &[measure::QEMU])?;
    let short = args.quick || args.icount;
    let rounds = args.rounds.unwrap_or(if short { 1 } else { 5 });
    let plan = Plan {
        sources: Sources::new(IMAGE, "vmlinuz", &[UEVENTS])?,
        cases: cases::chosen(&args.only, &Peers::default())?,
        rounds,
        warmups: if args.icount { 2 } else { 3 },
        additions: if short { 5 } else { 30 },
    };
    let mut record = Record::default();
    record.note("guest", IMAGE);
    let measured = if args.icount {
        plan.counted_job().measure(&progress, &mut record)
    } else {
        let cases = u32::try_from(plan.cases.len())?;
        let job = Job {
            bench: "hotplug",
            limit: CASE_LIMIT * cases * (plan.rounds + 1),
            plan,
            in_lab: false,
        };
        job.measure(&progress, &mut record, |(), _| {})
    };
    // Also record a benchmark that ended early: its values are valid.
    println!("{}", report::text(&record));
    let is_partial = args.quick || !args.only.is_empty();
    let name = record::name("hotplug", &[("icount", args.icount), ("quick", is_partial)]);
    let setting = report::setting(&record);
    record.publish(&name, &setting, Better::Less, &report::plot(&record))?;
    measured
}
