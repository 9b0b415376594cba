//! `cargo xtask bench idle`: the VM exits and the memory that the guest agent adds to an idle guest.

pub mod inside;

use super::bench_files::Sources;
use super::figures;
use super::limits::{Limit, held, panels};
use super::measure::{self, Job};
use super::record::{self, Record};
use super::svg::Better;
use super::table::join;
use anyhow::Result;
use inside::{AGENT, EXITS, METRICS, PLAIN, Plan, RESIDENT};
use std::time::Duration;
use xtask::progress::Progress;

/// Arguments of `cargo xtask bench idle`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of both cases, which run at the same time
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One short round, which only shows that the benchmark works
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
}

const IMAGE: &str = "initramfs-6.12-agent";
/// Time until a guest is idle, and its agent is asked at the longest intervals.
const SETTLE: Duration = Duration::from_secs(150);
/// Time in which exits are counted.
const COUNTED: Duration = Duration::from_secs(120);
/// The same of a short round.
const QUICK: Duration = Duration::from_secs(10);
/// Maximum time of a round beside that.
const ROUND_LIMIT: Duration = Duration::from_secs(300);
/// Most that the agent may add.
const LIMITS: [Limit; 2] = [
    Limit::at_most(AGENT, EXITS, "the agent adds, exits a second", 3.0).beyond(PLAIN, EXITS),
    Limit::at_most(AGENT, RESIDENT, "the agent adds, KiB", 300.0).beyond(PLAIN, RESIDENT),
];

/// Runs `cargo xtask bench idle`.
pub fn run(args: Args) -> Result<()> {
    let progress = Progress::on_stderr();
    measure::prepare(&progress, &[IMAGE], &[])?;
    let time = |long| if args.quick { QUICK } else { long };
    let plan = Plan {
        sources: Sources::new(IMAGE, "vmlinuz", &[])?,
        rounds: if args.quick { 1 } else { args.rounds },
        settle: time(SETTLE),
        counted: time(COUNTED),
    };
    let mut record = Record::default();
    let job = Job {
        bench: "idle",
        limit: (ROUND_LIMIT + plan.settle + plan.counted) * (plan.rounds + 1),
        plan,
        in_lab: false,
    };
    let measured = job.measure(&progress, &mut record, |(), _| {});
    let setting = format!("an idle guest without and with qemu-ga; {}", record.machine());
    let table = figures::medians(&record, "median", &[PLAIN, AGENT], |_| None, METRICS);
    println!("{}", join([setting.clone(), table, held(&record, &LIMITS)]));
    let name = record::name("idle", &[("quick", args.quick)]);
    let panels = panels(&record, &LIMITS, &[AGENT, PLAIN], [METRICS[0], METRICS[1]]);
    record.publish(&name, &setting, Better::Less, &panels)?;
    measured
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_for_the_difference() {
        let verdict = |agent: f64| {
            let record = Record::example([(PLAIN, EXITS, 25.0), (AGENT, EXITS, agent)]);
            held(&record, &LIMITS)
        };
        assert_eq!(
            verdict(28.5),
            "MISSED  the agent adds, exits a second  3.50  ≤ 3.00"
        );
        assert!(verdict(27.9).starts_with("ok"));
        assert_eq!(held(&Record::default(), &LIMITS), "");
    }
}
