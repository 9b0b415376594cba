//! `cargo xtask test`: lints, unit tests and the end-to-end suite. The last line of its output is
//! `N passed, N failed, N skipped`.
//!
//! One build serves lints, unit tests and the programs of the end-to-end tests, except for the VMM. After it the
//! end-to-end cases run in two labs of one processor each, and the unit tests in the time that the labs leave idle.

mod deny;
mod fuzzing;
mod kubevirt;
mod queue;
mod reboot;
mod rounds;
mod soak;
mod stages;
mod suite;
mod tally;
mod unit;

use crate::binaries::Profile;
use crate::exit_code;
use crate::native::native_kvm;
use crate::packages::{self, Tool, tool};
use crate::progress::Progress;
use crate::{binaries, cluster, images, lab, upstream};
use anyhow::{Result, bail};
use stages::{Stage, Stages};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use suite::{Suite, Tier};

pub use reboot::{Args as RebootArgs, run as reboot};
pub use rounds::{Round, commit, record, store, time_spent};
pub use soak::{Args as SoakArgs, run as soak};
pub use unit::with_lints;

/// Time after which failed cases are not repeated and lost labs are not replaced.
const END_TO_END_LIMIT: Duration = Duration::from_secs(40 * 60);
/// The same for `--full`.
const FULL_LIMIT: Duration = Duration::from_secs(120 * 60);
/// Commands that cases with real guests run in addition to Husk. The lab contains them.
const TOOLS: [Tool; 5] = [
    tool("qemu-img", "qemu-utils"),
    tool("dmsetup", "dmsetup"),
    tool("mkfs.ext4", "e2fsprogs"),
    tool("sg_inq", "sg3-utils"),
    tool("ssh", "openssh-client"),
];

/// Arguments of `cargo xtask test`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Also run slow cases, cases with upstream programs and cargo deny
    #[arg(long)]
    full: bool,
    /// Also run the cases with programs built from Go modules: the newest containerd, a kubelet
    #[arg(long)]
    peers: bool,
    /// Run only the cases under KubeVirt's control plane, built from this checkout of KubeVirt; needs root
    #[arg(long, value_name = "CHECKOUT", conflicts_with_all = ["full", "peers"])]
    kubevirt: Option<PathBuf>,
    /// Run only the end-to-end cases, with the existing binaries
    #[arg(long)]
    no_build: bool,
    /// List the end-to-end cases with their tiers and run nothing
    #[arg(long)]
    list: bool,
    /// Run only the tests whose name contains this, and no lints
    filter: Option<String>,
}

impl Args {
    fn tiers(&self) -> Vec<Tier> {
        let mut tiers = vec![Tier::Default];
        if self.full {
            tiers.push(Tier::Full);
        }
        if self.full || self.peers {
            tiers.push(Tier::Upstream);
        }
        tiers
    }
}

/// Runs `cargo xtask test`; fails if anything failed or could not be run.
pub fn run(args: &Args) -> Result<ExitCode> {
    let progress = Progress::on_stderr();
    if args.list {
        binaries::build(Profile::EndToEnd, &progress)?;
        return suite::list().map(|()| ExitCode::SUCCESS);
    }
    lab::exit_on_signals()?;
    if args.kubevirt.is_none() && cluster::exists() {
        bail!("a cluster uses the labs: end it by cargo xtask cluster down");
    }
    let stages = Stages::new();
    if let Some(source) = &args.kubevirt {
        kubevirt::run(&stages, source, !args.no_build, args.filter.as_deref());
        return Ok(exit_code(stages.close()));
    }
    if args.no_build {
        if stages.run("images", |_| make_images(args, &progress)) {
            stages.run("end to end", |stage| run_cases(stage, args, &progress));
        } else {
            stages.fail("end to end", "not run, because the images failed");
        }
        return Ok(exit_code(stages.close()));
    }
    let lints = args.filter.is_none();
    let (stages, progress) = (&stages, &progress);
    if lints {
        stages.run("fmt", |_| {
            let workspaces: [&[&str]; 2] = [&["--all"], &["--manifest-path", "fuzz/Cargo.toml"]];
            for workspace in workspaces {
                let status = unit::cargo(&["fmt", "--check"]).args(workspace).status()?;
                if !status.success() {
                    bail!("{status}");
                }
            }
            Ok(())
        });
    }
    let (vmm, tests, made) = std::thread::scope(|scope| {
        // It mostly waits for the network.
        let made = scope.spawn(|| stages.run("images", |_| make_images(args, progress)));
        let vmm = stages.run("VMM build", |stage| {
            stage.cpu = binaries::build_vmm(Profile::EndToEnd, progress)?;
            Ok(())
        });
        let name = if lints {
            "clippy and test build"
        } else {
            "test build"
        };
        let tests = stages.run(name, |stage| unit::build(stage, lints));
        (vmm, tests, made.join().unwrap_or_default())
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if vmm && tests && made {
                stages.run("end to end", |stage| run_cases(stage, args, progress));
            } else {
                stages.fail("end to end", "not run, because a build or the images failed");
            }
        });
        if lints && !args.full {
            scope.spawn(|| stages.run("fuzz targets", fuzzing::compile));
        }
        if tests {
            stages.run("unit tests", |stage| {
                unit::test(stage, lints, args.filter.as_deref(), progress)
            });
        } else {
            stages.fail("unit tests", "not run, because their build failed");
        }
        if args.full && lints {
            stages.run("cargo deny", |stage| deny::check(stage, progress));
            stages.run("fuzz targets", |stage| fuzzing::check(stage, progress));
        }
    });
    Ok(exit_code(stages.close()))
}

/// Makes the lab's image, guest images and upstream programs that the run needs, unless they are in the cache.
fn make_images(args: &Args, progress: &Progress) -> Result<()> {
    if native_kvm() {
        packages::ensure(progress, &TOOLS)?;
    }
    lab::ensure_image(progress)?;
    if args.full {
        images::ensure_all(progress)?;
    } else {
        images::ensure_default(progress)?;
    }
    if args.tiers().contains(&Tier::Upstream) {
        upstream::ensure(progress)?;
    }
    Ok(())
}

/// The suite that boots real guests, in the labs or on this machine.
fn run_cases(stage: &mut Stage, args: &Args, progress: &Progress) -> Result<()> {
    let mut suite = Suite::copy(Profile::EndToEnd)?;
    let tiers = args.tiers();
    if tiers.contains(&Tier::Upstream) {
        suite.upstream = Some(upstream::ensure(progress)?);
    }
    let cases = suite.cases(&tiers, args.filter.as_deref())?;
    if cases.is_empty() && args.filter.is_none() {
        bail!("the suite lists no cases");
    }
    let limit = if args.full { FULL_LIMIT } else { END_TO_END_LIMIT };
    queue::run(stage, &suite, cases, &[], limit, progress)
}
