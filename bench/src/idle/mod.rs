//! `cargo xtask bench idle`: the VM exits and the memory that the guest agent adds to an idle guest.

mod inside;

use super::figures;
use super::measure::{self, Job};
use super::record::Record;
use super::stats::summary;
use super::svg::{Better, Panel};
use anyhow::Result;
use inside::{AGENT, EXITS, METRICS, PLAIN, Plan, RESIDENT};
use std::time::Duration;
use xtask::progress::Progress;
use xtask::{checkout, images};

/// Arguments of `cargo xtask bench idle`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of both cases, which run at the same time
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One short round, which only shows that the benchmark works
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Measure this plan on this machine (the command runs itself this way where KVM is)
    #[arg(long, hide = true, value_name = "JSON")]
    inside: Option<String>,
}

const IMAGE: &str = "initramfs-6.12-agent";
/// Time until a guest is idle, and its agent is asked at the longest intervals.
const SETTLE: Duration = Duration::from_secs(150);
/// Time in which exits are counted.
const COUNTED: Duration = Duration::from_secs(120);
/// Maximum time of a round beside that.
const ROUND_LIMIT: Duration = Duration::from_secs(300);
/// Most that the agent may add: exits in a second, and KiB of the VMM and its monitor.
const BARS: [(&str, &str, f64); 2] = [(EXITS, "exits a second", 3.0), (RESIDENT, "KiB", 300.0)];

/// Runs `cargo xtask bench idle`.
pub fn run(args: Args) -> Result<()> {
    if let Some(plan) = &args.inside {
        return inside::run(&serde_json::from_str(plan)?);
    }
    let progress = Progress::on_stderr();
    measure::prepare(&progress, &[IMAGE], &[])?;
    let image = images::path(IMAGE)?;
    let plan = Plan {
        release: checkout::release(),
        kernel: image.join("vmlinuz"),
        initrd: image.join("initrd"),
        rounds: if args.quick { 1 } else { args.rounds },
        settle: if args.quick {
            Duration::from_secs(10)
        } else {
            SETTLE
        },
        counted: if args.quick {
            Duration::from_secs(10)
        } else {
            COUNTED
        },
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
    let metrics = METRICS.map(|(metric, _, label)| (label.to_owned(), metric.to_owned()));
    let table = figures::medians(&record, "median", &[PLAIN, AGENT], |_| None, metrics);
    println!("{setting}\n\n{table}\n");
    for (metric, unit, bar) in BARS {
        println!("{}", verdict(&record, metric, unit, bar));
    }
    let name = if args.quick { "idle-quick" } else { "idle" };
    record.publish(
        name,
        &setting,
        Better::Less,
        &BARS.map(|(metric, _, bar)| plot(&record, metric, bar)),
    )?;
    measured
}

fn median(record: &Record, case: &str, metric: &str) -> Option<f64> {
    Some(summary(&record.values(case, metric))?.median)
}

fn verdict(record: &Record, metric: &str, unit: &str, bar: f64) -> String {
    let median = |case| median(record, case, metric);
    let (Some(plain), Some(agent)) = (median(PLAIN), median(AGENT)) else {
        return format!("MISSED  {unit}: nothing was measured");
    };
    let cost = agent - plain;
    let word = if cost <= bar { "ok" } else { "MISSED" };
    format!("{word}  the agent adds {cost:.1} {unit}; the bar is {bar}")
}

fn plot(record: &Record, metric: &str, bar: f64) -> Panel {
    let label = METRICS.iter().find(|(name, ..)| *name == metric);
    let bars = [PLAIN, AGENT].map(|case| Some((case.to_owned(), summary(&record.values(case, metric))?)));
    Panel {
        title: label.map_or(metric, |(_, _, label)| label).to_owned(),
        bars: bars.into_iter().flatten().collect(),
        limit: median(record, PLAIN, metric).map(|plain| plain + bar),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Measurement;

    #[test]
    fn the_bar_is_for_the_difference() {
        let mut record = Record::default();
        for (case, value) in [(PLAIN, 25.0), (AGENT, 28.5)] {
            record.measurements.push(Measurement {
                bench: "idle".into(),
                case: case.into(),
                metric: EXITS.into(),
                unit: "1/s".into(),
                value,
                run: 1,
            });
        }
        let verdict = |record: &Record| verdict(record, EXITS, "exits a second", 3.0);
        assert_eq!(
            verdict(&record),
            "MISSED  the agent adds 3.5 exits a second; the bar is 3"
        );
        record.measurements[1].value = 27.9;
        assert!(verdict(&record).starts_with("ok"));
        assert!(verdict(&Record::default()).starts_with("MISSED"));
    }
}
