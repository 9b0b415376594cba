//! `cargo xtask bench snapshot`: the time to save a guest and until a restored one answers, compared with QEMU's
//! migration to and from a file, and the memory of many clones of one guest.

mod case;
mod clones;
pub mod inside;
mod report;

use super::bench_files::Sources;
use super::cases::{self, BenchCase};
use super::measure::{self, Job};
use super::peers::Peers;
use super::record::{self, Record};
use super::svg::Better;
use anyhow::{Result, ensure};
pub use case::Case;
use inside::{ANSWERS, Plan};
use std::time::Duration;
use xtask::progress::Progress;

/// Arguments of `cargo xtask bench snapshot`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of all cases
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Clones of one guest; 0 for none
    #[arg(long, default_value_t = 20)]
    clones: u32,
    /// Measure this case only; may be repeated
    #[arg(long, value_enum)]
    only: Vec<Case>,
    /// One round and few clones, which only shows that the benchmark works: a missed bar is no failure
    #[arg(long, conflicts_with_all = ["rounds", "clones"])]
    quick: bool,
}

/// Image of the guest.
const IMAGE: &str = "initramfs-6.12";
/// Clones of a quick run.
const FEW: u32 = 3;
/// Maximum time of a round, on any machine.
const ROUND_LIMIT: Duration = Duration::from_secs(600);
/// Maximum time of a clone.
const CLONE_LIMIT: Duration = Duration::from_secs(60);

/// Runs `cargo xtask bench snapshot`.
///
/// # Errors
/// Also if a bar is missed.
pub fn run(args: Args) -> Result<()> {
    let progress = Progress::on_stderr();
    measure::prepare(&progress, &[IMAGE], &[measure::QEMU])?;
    let plan = Plan {
        sources: Sources::new(IMAGE, "vmlinuz", &[ANSWERS])?,
        cases: cases::chosen(&args.only, &Peers::default())?,
        rounds: if args.quick { 1 } else { args.rounds },
        clones: if args.quick { FEW } else { args.clones },
        thorough: !args.quick,
    };
    let mut record = Record::default();
    record.note("guest", IMAGE);
    let job = Job {
        bench: "snapshot",
        limit: ROUND_LIMIT * (plan.rounds + 2) + CLONE_LIMIT * plan.clones,
        plan,
        in_lab: false,
    };
    let measured = job.measure(&progress, &mut record, |(case, why): (Case, String), step| {
        step.say(&format!("without {}: {why}", case.name()));
    });
    // Also record a benchmark that ended early: its values are valid.
    println!("{}", report::text(&record));
    let is_partial = args.quick || !args.only.is_empty();
    let name = record::name("snapshot", &[("quick", is_partial)]);
    let setting = report::setting(&record);
    record.publish(&name, &setting, Better::Less, &report::plot(&record))?;
    measured?;
    let missed = report::missed(&record);
    ensure!(args.quick || missed == 0, "missed bars: {missed}");
    Ok(())
}
