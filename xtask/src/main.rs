//! Tasks for this checkout: tests, benchmarks, the demonstration, and the lab that they run in.

use anyhow::Result;
use clap::Parser;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;
use xtask::{checkout, cluster, demo, fuzz, images, lab, test};

/// Runs tests, benchmarks and other tasks for this checkout.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    version,
    arg_required_else_help = true
)]
enum Xtask {
    /// Runs the lab: a Debian with a real /dev/kvm
    Lab(lab::Args),
    /// Checks, builds and tests everything
    Test(test::Args),
    /// Runs tests that take from minutes to hours each: gibibytes of verified I/O, a thousand disks
    Soak(test::SoakArgs),
    /// Reboots the lab with VMs that husk apply keeps, and cuts its power while objects change
    Reboot(test::RebootArgs),
    /// Makes guest kernels and disk images, or the container image of deploy/
    Images(images::Args),
    /// Measures Husk, mostly in comparison with QEMU
    #[command(disable_help_flag = true)]
    Bench {
        /// The benchmark and its options: see `cargo xtask bench --help`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Fuzzes what reads the bytes of guests, users and peers
    Fuzz(fuzz::Args),
    /// Runs a Kubernetes cluster with KubeVirt's control plane and nodes with Husk
    Cluster(cluster::Args),
    /// Boots Debian from a manifest and shows each step
    Demo(demo::Args),
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run() -> Result<ExitCode> {
    match Xtask::parse() {
        Xtask::Lab(args) => return lab::run(args),
        Xtask::Test(args) => return test::run(&args),
        Xtask::Soak(args) => return test::soak(&args),
        Xtask::Reboot(args) => return test::reboot(&args),
        Xtask::Fuzz(args) => return fuzz::run(&args),
        Xtask::Cluster(args) => return cluster::run(args),
        Xtask::Images(args) => images::run(args)?,
        Xtask::Bench { arguments } => bench(&arguments)?,
        Xtask::Demo(args) => demo::run(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the program of the benchmarks, and replaces this process with it. Relative paths stay those of the user.
fn bench(arguments: &[OsString]) -> Result<()> {
    let mut cargo = checkout::cargo();
    cargo
        .args(["run", "--quiet", "--package", "husk-bench", "--manifest-path"])
        .arg(checkout::root().join("Cargo.toml"))
        .arg("--")
        .args(arguments);
    Err(anyhow::Error::new(cargo.exec()).context("cannot start cargo"))
}
