//! `cargo xtask bench pod`: the time from `ctr run` to a guest's user space, and the cost of the whole pod, compared
//! with QEMU.

mod case;
mod containerd;
mod image;
pub mod inside;
mod overhead;
mod report;
mod running;

use super::bench_files::Sources;
use super::measure::{self, Job};
use super::record::{self, Record};
use super::svg::Better;
use anyhow::Result;
use containerd::SHIM;
use inside::Plan;
use std::time::Duration;
use xtask::progress::Progress;

/// Arguments of `cargo xtask bench pod`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of single starts
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Rounds of many starts at once
    #[arg(long, default_value_t = 1)]
    many_rounds: u32,
    /// Number of guests
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    many: u32,
    /// One round of everything without warm-up and with four pods at once, which only shows that the benchmark works
    #[arg(long, conflicts_with_all = ["rounds", "many_rounds", "many"])]
    quick: bool,
}

/// Image of the guest.
const IMAGE: &str = "initramfs-6.12";

/// Number of simultaneous guests in a short run.
const FEW: u32 = 4;

/// Maximum time of a start, on any machine, including the steps that are not measured.
const START_LIMIT: Duration = Duration::from_secs(150);

/// Runs `cargo xtask bench pod`.
pub fn run(args: Args) -> Result<()> {
    let progress = Progress::on_stderr();
    measure::prepare(&progress, &[IMAGE], &[])?;
    let plan = Plan {
        sources: Sources::new(IMAGE, "vmlinuz", &[SHIM])?,
        rounds: if args.quick { 1 } else { args.rounds },
        many_rounds: if args.quick { 1 } else { args.many_rounds },
        many: if args.quick { FEW } else { args.many },
        thorough: !args.quick,
    };
    let mut record = Record::default();
    record.note("guest", IMAGE);
    let starts = (plan.rounds + 2) * 3 + plan.many_rounds * plan.many * 2;
    let job = Job {
        bench: "pod",
        limit: START_LIMIT * starts,
        plan,
        // The lab has the containerd.
        in_lab: true,
    };
    let measured = job.measure(&progress, &mut record, |(), _| {});
    // Also record a benchmark that ended early: its values are valid.
    println!("{}", report::text(&record));
    let name = record::name("pod", &[("quick", args.quick)]);
    let setting = report::setting(&record);
    record.publish(&name, &setting, Better::Less, &report::plot(&record))?;
    measured
}
