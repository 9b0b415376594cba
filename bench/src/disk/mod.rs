//! `cargo xtask bench disk`: several kinds of requests to one disk, compared with QEMU.

mod absent;
mod case;
mod cell;
mod counted;
mod fio;
mod inside;
mod report;

use super::measure::{self, Job};
use super::peers::Peers;
use super::record::Record;
use super::svg;
use anyhow::Result;
use case::Case;
use cell::CELLS;
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
    #[command(flatten)]
    peers: Peers,
    /// One short round without warm-up, which only shows that the benchmark works
    #[arg(long, conflicts_with = "rounds")]
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
    let (ramp_ms, time_ms) = match (args.icount, args.quick) {
        (true, _) => (100, 400),
        (false, true) => (0, 1000),
        (false, false) => (1000, 3000),
    };
    let rounds = args.rounds.unwrap_or(if args.icount { 1 } else { 10 });
    let mut cases = chosen(&args.only, &args.peers);
    if args.icount {
        // The machine has no qemu-img.
        cases.retain(|case| !case.is_qcow2());
    }
    let plan = Plan {
        release: checkout::release(),
        kernel: image.join("vmlinux"),
        initrd: image.join("initrd"),
        cases,
        only: args.load.clone(),
        peers: args.peers.staged()?,
        // It fits into any host's page cache.
        disk_mib: if args.icount { 16 } else { 256 },
        rounds: if args.quick { 1 } else { rounds },
        ramp_ms,
        time_ms,
        thorough: !args.quick,
    };
    let mut record = Record::default();
    record.env.insert("guest".to_owned(), json!(IMAGE));
    if args.icount {
        let measured = counted::measure(&progress, &plan, &mut record);
        println!("{}", report::text(&record, &[]));
        let setting = report::setting(&record);
        let name = name(
            "disk-icount",
            args.quick || !args.only.is_empty() || args.load.is_some(),
        );
        record.publish(&name, &setting, svg::Better::More, &report::plot(&record))?;
        return measured;
    }
    let mut absent = Vec::new();
    let rounds = (plan.rounds + 1) * u32::try_from(plan.cases.len())?;
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
    let name = name("disk", args.quick || !args.only.is_empty() || args.load.is_some());
    let setting = report::setting(&record);
    record.publish(&name, &setting, svg::Better::More, &report::plot(&record))?;
    measured
}

/// Name of the record: a short run, or a run of one case, does not replace a measurement.
fn name(bench: &str, part: bool) -> String {
    format!("{bench}{}", if part { "-quick" } else { "" })
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
