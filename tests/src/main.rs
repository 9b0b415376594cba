//! `husk-e2e`: see the library.

use clap::Parser;
use husk_tests::cases;
use husk_tests::harness::context::TestContext;
use husk_tests::harness::runner::{self, Options};
use libtest_mimic::Arguments;
use std::path::PathBuf;
use std::process::ExitCode;

/// Run the end-to-end tests
///
/// Needs a /dev/kvm that runs guests natively, Husk's programs beside this one or on PATH, and the guest
/// images of `cargo xtask images` (in HUSK_IMAGES, else in the cache of this user).
#[derive(Debug, Parser)]
#[command(name = "husk-e2e")]
struct Args {
    #[command(flatten)]
    harness: Arguments,

    /// Run the slow tests of `cargo xtask test --full`, which are not run otherwise
    #[arg(long)]
    full: bool,

    /// Run the long tests, which are not run otherwise
    #[arg(long)]
    long: bool,

    /// Run the tests with upstream programs built from Go modules (in HUSK_PEERS), which are not run otherwise
    #[arg(long)]
    peers: bool,

    /// Run the tests of VMs under KubeVirt's control plane (its clients in HUSK_CLUSTER), which are not run otherwise
    #[arg(long)]
    kubevirt: bool,

    /// Run the tests with KubeVirt's example manifests (in HUSK_EXAMPLES), which are not run otherwise
    #[arg(long)]
    examples: bool,

    /// Run the phases between which the machine boots again, which are not run otherwise
    #[arg(long)]
    host: bool,

    /// Keep the folders of tests that fail
    #[arg(long)]
    keep: bool,

    /// Run this one test in this process, in this folder (the program runs each test this way)
    #[arg(long, hide = true, num_args = 2, value_names = ["NAME", "FOLDER"])]
    run_case: Vec<String>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let (cases, tier) = if args.long {
        (cases::LONG, Some("--long"))
    } else if args.peers {
        (cases::UPSTREAM, Some("--peers"))
    } else if args.kubevirt {
        (cases::KUBEVIRT, Some("--kubevirt"))
    } else if args.examples {
        (cases::EXAMPLES, Some("--examples"))
    } else if args.host {
        (cases::HOST, Some("--host"))
    } else if args.full {
        (cases::FULL, Some("--full"))
    } else {
        (cases::DEFAULT, None)
    };
    if args.harness.list {
        for case in cases {
            println!("{:<32} {}", case.name, case.about);
        }
        return ExitCode::SUCCESS;
    }
    let done = match args.run_case.as_slice() {
        [name, folder] => TestContext::at(PathBuf::from(folder)).and_then(|ctx| ctx.run_case(cases, name)),
        _ => runner::run(
            cases,
            args.harness,
            Options {
                keep: args.keep,
                tier,
            },
        ),
    };
    // As a shell reports it, so that the caller can distinguish it from a failed case.
    if let Some(signal) = runner::interrupted() {
        return ExitCode::from(128 + u8::try_from(signal).unwrap_or_default());
    }
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("husk-e2e: {error:#}");
            ExitCode::FAILURE
        }
    }
}
