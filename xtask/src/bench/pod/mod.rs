//! `cargo xtask bench pod`: from `ctr run` to a guest's user space, and what the whole pod costs, beside QEMU.

mod case;
mod containerd;
mod image;
mod inside;
mod overhead;
mod report;
mod running;

use super::measure::{self, Job};
use super::record::Record;
use super::svg;
use crate::progress::Progress;
use crate::{checkout, images};
use anyhow::Result;
use inside::Plan;
use serde_json::json;
use std::time::Duration;

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
    /// One round of everything, with four pods at once, without warming up: shows that the benchmark works, not how fast
    /// anything is
    #[arg(long, conflicts_with_all = ["rounds", "many_rounds", "many"])]
    quick: bool,
    /// Measure here and now what this plan says (how the command runs itself where KVM is)
    #[arg(long, hide = true, value_name = "JSON")]
    inside: Option<String>,
}

/// The guest.
const IMAGE: &str = "initramfs-6.12";

/// As many at once as show that it works.
const FEW: u32 = 4;

/// The longest a start may take, wherever it is done, and what is not measured.
const START_LIMIT: Duration = Duration::from_secs(150);

/// Runs `cargo xtask bench pod`.
pub fn run(args: Args) -> Result<()> {
    if let Some(plan) = &args.inside {
        return inside::run(&serde_json::from_str(plan)?);
    }
    let progress = Progress::new();
    measure::prepare(&progress, &[IMAGE], &[])?;
    let image = images::path(IMAGE)?;
    let plan = Plan {
        release: checkout::release(),
        kernel: image.join("vmlinuz"),
        initrd: image.join("initrd"),
        rounds: if args.quick { 1 } else { args.rounds },
        many_rounds: if args.quick { 1 } else { args.many_rounds },
        many: if args.quick { FEW } else { args.many },
        thorough: !args.quick,
    };
    let mut record = Record::default();
    record.env.insert("guest".to_owned(), json!(IMAGE));
    let starts = (plan.rounds + 2) * 3 + plan.many_rounds * plan.many * 2;
    let job = Job {
        bench: "pod",
        limit: START_LIMIT * starts,
        plan,
        // It has the containerd.
        in_lab: true,
    };
    let measured = job.measure(&progress, &mut record, |(), _| {});
    // Also of a benchmark that ended early: what was measured is true.
    println!("{}", report::text(&record));
    // A look at whether it works does not replace a measurement.
    let name = if args.quick { "pod-quick" } else { "pod" };
    let setting = report::setting(&record);
    record.publish(name, &setting, svg::Better::Less, &report::plot(&record))?;
    measured
}
