//! `cargo xtask bench disk`: several kinds of requests to one disk, compared with QEMU.

mod absent;
mod case;
mod cell;
mod fio;
mod inside;
mod report;

use super::measure::{self, Job};
use super::peers::Peers;
use super::record::Record;
use super::svg;
use anyhow::Result;
use case::Case;
use inside::{LeftOut, Plan};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use xtask::packages::Tool;
use xtask::progress::Progress;
use xtask::{checkout, images};

/// Arguments of `cargo xtask bench disk`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of all cases; at least ten are needed to compare two cases
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Measure only this case; may be given several times
    #[arg(long, value_enum, value_name = "CASE")]
    only: Vec<Case>,
    #[command(flatten)]
    peers: Peers,
    /// One short round without warm-up, which only shows that the benchmark works
    #[arg(long, conflicts_with = "runs")]
    quick: bool,
    /// Measure this plan on this machine (the command runs itself this way where KVM is)
    #[arg(long, hide = true, value_name = "JSON")]
    inside: Option<String>,
}

/// Image of the guest: its kernel, and fio.
const IMAGE: &str = "initramfs-6.12-disks";

/// Maximum time of a case in one round, on any machine.
const CASE_LIMIT: Duration = Duration::from_secs(300);

/// Runs `cargo xtask bench disk`.
pub fn run(args: Args) -> Result<()> {
    if let Some(plan) = &args.inside {
        return inside::run(&serde_json::from_str(plan)?);
    }
    let progress = Progress::on_stderr();
    let qemu_img = Tool {
        name: "qemu-img",
        package: "qemu-utils",
    };
    measure::prepare(&progress, &[IMAGE], &[measure::QEMU, qemu_img])?;
    let image = images::path(IMAGE)?;
    let (ramp, seconds) = if args.quick { (0, 1) } else { (1, 3) };
    let plan = Plan {
        release: checkout::release(),
        kernel: image.join("vmlinuz"),
        initrd: image.join("initrd"),
        cases: chosen(&args.only, &args.peers),
        peers: args.peers.staged()?,
        runs: if args.quick { 1 } else { args.runs },
        ramp,
        seconds,
        thorough: !args.quick,
    };
    let mut record = Record::default();
    record.env.insert("guest".to_owned(), json!(IMAGE));
    let mut absent = Vec::new();
    let rounds = (plan.runs + 1) * u32::try_from(plan.cases.len())?;
    let job = Job {
        bench: "disk",
        limit: CASE_LIMIT * rounds,
        plan,
        in_lab: false,
    };
    let measured = job.measure(&progress, &mut record, |LeftOut(case, why), step| {
        step.say(&format!("left out: {}: {why}", case.name()));
        absent.push((case, why));
    });
    let left_out = absent.iter().map(|(case, why)| (case.name(), why.as_str()));
    let left_out: BTreeMap<_, _> = left_out.collect();
    record.env.insert("left_out".to_owned(), json!(left_out));
    // Also record a benchmark that ended early: its values are valid.
    println!("{}", report::text(&record, &absent));
    // A short run, or a run of one case, does not replace a measurement.
    let whole = !args.quick && args.only.is_empty();
    let name = if whole { "disk" } else { "disk-quick" };
    let setting = report::setting(&record);
    record.publish(name, &setting, svg::Better::More, &report::plot(&record))?;
    measured
}

/// The cases to measure: all if `only` is empty, but those of peers that are given.
fn chosen(only: &[Case], peers: &Peers) -> Vec<Case> {
    let wanted = |case: &Case| {
        (only.is_empty() || only.contains(case)) && case.peer().is_none_or(|peer| peers.has(peer))
    };
    Case::ALL.into_iter().filter(wanted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_measured_in_their_own_order() {
        let none = Peers::default();
        assert!(chosen(&[], &none).iter().all(|case| case.peer().is_none()));
        assert_eq!(chosen(&[Case::Q35, Case::Husk], &none), [Case::Husk, Case::Q35]);
        let all = Peers {
            firecracker: Some("/fc".into()),
            cloud_hypervisor: Some("/ch".into()),
        };
        assert_eq!(chosen(&[], &all), Case::ALL);
    }
}
