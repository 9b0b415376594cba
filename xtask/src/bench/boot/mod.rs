//! `cargo xtask bench boot`: from a VMM's start to its guest's user space, and what it costs, beside QEMU.

mod case;
mod exits;
mod inside;
mod message;
mod report;
mod smaps;
mod started;
mod trace;

use super::record::Record;
use super::{host, svg};
use crate::native::native_kvm;
use crate::packages::{self, Tool};
use crate::progress::Progress;
use crate::{binaries, checkout, images, itself, lab};
use anyhow::{Result, bail};
use inside::Plan;
use message::{Message, Profile};
use serde_json::json;
use std::time::{Duration, Instant};

/// Arguments of `cargo xtask bench boot`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Rounds of boots of the same kernel and initrd
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Rounds of boots of a whole Debian from its disk
    #[arg(long, default_value_t = 3)]
    disk_runs: u32,
    /// The guest's kernel
    #[arg(long, value_enum, default_value_t)]
    kernel: Kernel,
    /// One round of everything, without warming up: shows that the benchmark works, not how fast anything is
    #[arg(long, conflicts_with_all = ["runs", "disk_runs"])]
    quick: bool,
    /// Measure here and now what this plan says (how the command runs itself where KVM is)
    #[arg(long, hide = true, value_name = "JSON")]
    inside: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum Kernel {
    /// Debian 12's, cloud flavour
    #[default]
    #[value(name = "6.1")]
    Bookworm,
    /// Debian 13's, cloud flavour
    #[value(name = "6.12")]
    Trixie,
}

impl Kernel {
    /// The image with kernel and initrd, and the one with a disk.
    fn images(self) -> [&'static str; 2] {
        match self {
            Self::Bookworm => ["initramfs-6.1", "debian-12-cloud"],
            Self::Trixie => ["initramfs-6.12", "debian-13-cloud"],
        }
    }
}

/// Rounds of boots looked at closely: their figures hardly vary.
const OBSERVED: u32 = 3;

/// The longest a round may take, wherever it is done.
const ROUND_LIMIT: Duration = Duration::from_secs(900);

/// Runs `cargo xtask bench boot`.
pub fn run(args: Args) -> Result<()> {
    if let Some(plan) = &args.inside {
        return inside::run(&serde_json::from_str(plan)?);
    }
    let began = Instant::now();
    let progress = Progress::new();
    binaries::build(&progress)?;
    let [kernel, disk] = args.kernel.images();
    images::ensure(&progress, &[kernel, disk])?;
    if native_kvm() {
        let qemu = Tool {
            name: "qemu-system-x86_64",
            package: "qemu-system-x86",
        };
        packages::ensure(&progress, &[qemu])?;
    }
    let kernel = images::path(kernel)?;
    let plan = Plan {
        release: checkout::release(),
        initrd: kernel.join("initrd"),
        kernel: kernel.join("vmlinuz"),
        disk: images::path(disk)?.join("disk.img"),
        runs: if args.quick { 1 } else { args.runs },
        observed: if args.quick { 1 } else { OBSERVED.min(args.runs) },
        disk_runs: if args.quick { 1 } else { args.disk_runs },
        thorough: !args.quick,
    };
    let (mut record, mut profiles) = (Record::default(), Vec::new());
    let measured = measure(&plan, &progress, &mut record, &mut profiles);
    let kernel = plan.kernel.parent().and_then(|folder| folder.file_name());
    let mut env = |name: &str, value| record.env.insert(name.to_owned(), value);
    env("where", json!(if native_kvm() { "native" } else { "lab" }));
    env("guest", json!(kernel.map(|name| name.to_string_lossy())));
    env("took_s", json!(began.elapsed().as_secs()));
    env("complete", json!(measured.is_ok()));
    // Also of a benchmark that ended early: what was measured is true.
    println!("{}", report::text(&record, &mut profiles));
    // A look at whether it works does not replace a measurement.
    let name = if args.quick { "boot-quick" } else { "boot" };
    let setting = report::setting(&record);
    record.publish(name, &setting, svg::Better::Less, &report::plot(&record))?;
    measured
}

/// Has the `plan` done where KVM is.
fn measure(plan: &Plan, progress: &Progress, record: &mut Record, profiles: &mut Vec<Profile>) -> Result<()> {
    let copy = itself::copy()?;
    let this = copy.to_string_lossy().into_owned();
    let words = [
        this,
        "bench".into(),
        "boot".into(),
        "--inside".into(),
        serde_json::to_string(plan)?,
    ];
    let rounds = plan.runs + plan.observed + plan.disk_runs + 1;
    record.env.insert("load_before".to_owned(), json!(host::load()));
    let step = progress.step("measuring");
    let status = lab::Command::new(words)
        .timeout(ROUND_LIMIT * rounds)
        .lines(progress, |line| match serde_json::from_str(line) {
            Ok(Message::News(news)) => step.news(&news),
            Ok(Message::Failed(what)) => step.say(&format!("failed, done again: {what}")),
            Ok(Message::Measured(measurement)) => record.measurements.push(measurement),
            Ok(Message::Env(more)) => record.env.extend(more),
            Ok(Message::Profile(profile)) => {
                profiles.retain(|known: &Profile| known.case != profile.case);
                profiles.push(profile);
            }
            Err(_) => step.say(line),
        })?;
    if status != 0 {
        bail!("the benchmark ended early, with status {status}");
    }
    step.done();
    record.env.insert("load_after".to_owned(), json!(host::load()));
    Ok(())
}
