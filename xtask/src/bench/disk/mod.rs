//! `cargo xtask bench disk`: requests of several kinds to one disk, beside QEMU.

mod archive;
mod case;
mod cell;
mod fio;
mod inside;
mod message;
mod report;
mod started;

use super::record::Record;
use super::{host, svg};
use crate::native::native_kvm;
use crate::packages::{self, Tool};
use crate::progress::Progress;
use crate::{binaries, checkout, images, itself, lab};
use anyhow::{Result, bail};
use case::Case;
use inside::Plan;
use message::Message;
use serde_json::json;
use std::time::{Duration, Instant};

/// Arguments of `cargo xtask bench disk`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of all cases; ten are the fewest that say how far two of them are apart
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Measure only this case; may be given several times
    #[arg(long, value_enum, value_name = "CASE")]
    only: Vec<Case>,
    /// One short round, without warming up: shows that the benchmark works, not how fast anything is
    #[arg(long, conflicts_with = "runs")]
    quick: bool,
    /// Measure here and now what this plan says (how the command runs itself where KVM is)
    #[arg(long, hide = true, value_name = "JSON")]
    inside: Option<String>,
}

/// The guest: its kernel, and fio.
const IMAGE: &str = "initramfs-6.12-disks";

/// The longest a case may take in one round, wherever it is done.
const CASE_LIMIT: Duration = Duration::from_secs(300);

/// Runs `cargo xtask bench disk`.
pub fn run(args: Args) -> Result<()> {
    if let Some(plan) = &args.inside {
        return inside::run(&serde_json::from_str(plan)?);
    }
    let began = Instant::now();
    let progress = Progress::new();
    binaries::build(&progress)?;
    images::ensure(&progress, &[IMAGE])?;
    if native_kvm() {
        let tools = [
            ("qemu-system-x86_64", "qemu-system-x86"),
            ("qemu-img", "qemu-utils"),
        ];
        packages::ensure(&progress, &tools.map(|(name, package)| Tool { name, package }))?;
    }
    let image = images::path(IMAGE)?;
    let (ramp, seconds) = if args.quick { (0, 1) } else { (1, 3) };
    let plan = Plan {
        release: checkout::release(),
        kernel: image.join("vmlinuz"),
        initrd: image.join("initrd"),
        cases: chosen(&args.only),
        runs: if args.quick { 1 } else { args.runs },
        ramp,
        seconds,
        thorough: !args.quick,
    };
    let (mut record, mut absent) = (Record::default(), Vec::new());
    let measured = measure(&plan, &progress, &mut record, &mut absent);
    let left_out = absent.iter().map(|(case, why)| (case.name(), why.as_str()));
    let left_out: std::collections::BTreeMap<_, _> = left_out.collect();
    let mut env = |name: &str, value| record.env.insert(name.to_owned(), value);
    env("where", json!(if native_kvm() { "native" } else { "lab" }));
    env("guest", json!(IMAGE));
    env("left_out", json!(left_out));
    env("took_s", json!(began.elapsed().as_secs()));
    env("complete", json!(measured.is_ok()));
    // Also of a benchmark that ended early: what was measured is true.
    println!("{}", report::text(&record, &absent));
    // A look at whether it works, or at one case, does not replace a measurement.
    let whole = !args.quick && args.only.is_empty();
    let name = if whole { "disk" } else { "disk-quick" };
    let setting = report::setting(&record);
    record.publish(name, &setting, svg::Better::More, &report::plot(&record))?;
    measured
}

/// The cases to measure: all if `only` has none.
fn chosen(only: &[Case]) -> Vec<Case> {
    let wanted = |case: &Case| only.is_empty() || only.contains(case);
    Case::ALL.into_iter().filter(wanted).collect()
}

/// Has the `plan` done where KVM is.
fn measure(
    plan: &Plan,
    progress: &Progress,
    record: &mut Record,
    absent: &mut Vec<(Case, String)>,
) -> Result<()> {
    let copy = itself::copy()?;
    let this = copy.to_string_lossy().into_owned();
    let words = [
        this,
        "bench".into(),
        "disk".into(),
        "--inside".into(),
        serde_json::to_string(plan)?,
    ];
    let rounds = (plan.runs + 1) * u32::try_from(plan.cases.len())?;
    record.env.insert("load_before".to_owned(), json!(host::load()));
    let step = progress.step("measuring");
    let status = lab::Command::new(words)
        .timeout(CASE_LIMIT * rounds)
        .lines(progress, |line| match serde_json::from_str(line) {
            Ok(Message::News(news)) => step.news(&news),
            Ok(Message::Failed(what)) => step.say(&format!("failed, done again: {what}")),
            Ok(Message::Absent(case, why)) => {
                step.say(&format!("left out: {}: {why}", case.name()));
                absent.push((case, why));
            }
            Ok(Message::Measured(measurement)) => record.measurements.push(measurement),
            Ok(Message::Env(more)) => record.env.extend(more),
            Err(_) => step.say(line),
        })?;
    if status != 0 {
        bail!("the benchmark ended early, with status {status}");
    }
    step.done();
    record.env.insert("load_after".to_owned(), json!(host::load()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_measured_in_their_own_order() {
        assert_eq!(chosen(&[]), Case::ALL);
        assert_eq!(chosen(&[Case::Q35, Case::Husk]), [Case::Husk, Case::Q35]);
    }
}
