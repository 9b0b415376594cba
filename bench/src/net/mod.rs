//! `cargo xtask bench net`: streams, packets and round trips between a guest and a peer, compared with QEMU.

mod case;
mod cell;
mod inside;
mod report;
mod wire;

use super::measure::{self, Job};
use super::peers::Peers;
use super::record::Record;
use super::svg;
use anyhow::Result;
use case::Case;
use inside::Plan;
use serde_json::json;
use std::time::Duration;
use xtask::packages::Tool;
use xtask::progress::Progress;
use xtask::{checkout, images};

/// Arguments of `cargo xtask bench net`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of all cases; at least ten are needed to compare two cases
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Measure only this case; may be given several times
    #[arg(long, value_enum, value_name = "CASE")]
    only: Vec<Case>,
    #[command(flatten)]
    peers: Peers,
    /// One short round without warm-up, which only shows that the benchmark works
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Measure this plan on this machine (the command runs itself this way where KVM is)
    #[arg(long, hide = true, value_name = "JSON")]
    inside: Option<String>,
}

/// Image of the guest.
const IMAGE: &str = "initramfs-6.12-network";

/// Maximum time of a case in one round, on any machine.
const CASE_LIMIT: Duration = Duration::from_secs(240);

/// Commands that set up the network.
const TOOLS: [Tool; 2] = [
    Tool {
        name: "ip",
        package: "iproute2",
    },
    Tool {
        name: "ethtool",
        package: "ethtool",
    },
];

/// Runs `cargo xtask bench net`.
pub fn run(args: Args) -> Result<()> {
    if let Some(plan) = &args.inside {
        return inside::run(&serde_json::from_str(plan)?);
    }
    let progress = Progress::on_stderr();
    let [ip, ethtool] = TOOLS;
    measure::prepare(&progress, &[IMAGE], &[measure::QEMU, ip, ethtool])?;
    let image = images::path(IMAGE)?;
    let (ramp_ms, time_ms) = if args.quick { (200, 1000) } else { (1000, 2500) };
    let plan = Plan {
        release: checkout::release(),
        kernel: image.join("vmlinuz"),
        initrd: image.join("initrd"),
        cases: chosen(&args.only, &args.peers),
        peers: args.peers.staged()?,
        rounds: if args.quick { 1 } else { args.rounds },
        ramp_ms,
        time_ms,
        thorough: !args.quick,
    };
    let mut record = Record::default();
    record.env.insert("guest".to_owned(), json!(IMAGE));
    let starts = (plan.rounds + 1) * u32::try_from(plan.cases.len())?;
    let job = Job {
        bench: "net",
        limit: CASE_LIMIT * starts,
        plan,
        in_lab: false,
    };
    let measured = job.measure(&progress, &mut record, |(), _| {});
    // Also record a benchmark that ended early: its values are valid.
    println!("{}", report::text(&record));
    // A short run, or a run of one case, does not replace a measurement.
    let whole = !args.quick && args.only.is_empty();
    let name = if whole { "net" } else { "net-quick" };
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
    }

    #[test]
    fn the_guests_script_is_shell() {
        let status = std::process::Command::new("sh")
            .args(["-n", "-c", include_str!("guest.sh")])
            .status()
            .expect("sh");
        assert!(status.success());
    }
}
