//! `cargo xtask test`: every check there is, and one true line about them at the end.

mod tally;

use crate::native::native_kvm;
use crate::packages::{self, Tool};
use crate::progress::Progress;
use crate::{binaries, checkout, images, lab, upstream};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use tally::Tally;

/// After this long no lost lab is replaced any more.
const END_TO_END_LIMIT: Duration = Duration::from_secs(45 * 60);
/// How often a case that fails in the lab is tried in all: QEMU's emulation of AMD-V is little used, and may have more
/// faults than the known one. A machine with native KVM gets no second try.
const TRIES_IN_THE_LAB: u32 = 3;
/// What cases with real guests need beside Husk. The lab has it.
const TOOLS: [Tool; 5] = [
    Tool {
        name: "qemu-img",
        package: "qemu-utils",
    },
    Tool {
        name: "dmsetup",
        package: "dmsetup",
    },
    Tool {
        name: "mkfs.ext4",
        package: "e2fsprogs",
    },
    Tool {
        name: "sg_inq",
        package: "sg3-utils",
    },
    Tool {
        name: "ssh",
        package: "openssh-client",
    },
];
/// What the tests of crates need: a pod's network is made as a plugin would and looked at, and a guest asks for its lease.
const TOOLS_OF_CRATES: [Tool; 4] = [
    Tool {
        name: "ip",
        package: "iproute2",
    },
    Tool {
        name: "busybox",
        package: "busybox",
    },
    Tool {
        name: "nft",
        package: "nftables",
    },
    Tool {
        name: "tcpdump",
        package: "tcpdump",
    },
];
/// How the names of cases begin that need the lab's versions of containerd.
const NEED_THE_LAB: &str = "shim-";
/// The longest one case may take.
const CASE_LIMIT: Duration = Duration::from_secs(12 * 60);
/// The same for one of `cargo xtask soak`.
const SOAK_LIMIT: Duration = Duration::from_secs(100 * 60);
/// Statuses of a case that was ended by Ctrl-C or SIGTERM, which `lab::Command` passes on to it.
const INTERRUPTED: [u8; 2] = [130, 143];
/// How many labs may be lost.
const LABS_LOST: u32 = 5;

/// Arguments of `cargo xtask test`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Also run Husk under peers built from Go modules: the newest containerd
    #[arg(long)]
    peers: bool,
    /// Run only the tests whose name contains this, and no lints
    filter: Option<String>,
}

/// Runs `cargo xtask test`; fails if anything failed or could not be run.
pub fn run(args: &Args) -> Result<ExitCode> {
    let progress = Progress::new();
    let mut tally = Tally::default();
    if args.filter.is_none() {
        let mut fmt = cargo(&["fmt", "--all", "--check"]);
        stage(&mut tally, "fmt", |_| succeed(&mut fmt));
        let mut clippy = cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]);
        stage(&mut tally, "clippy", |_| succeed(&mut clippy));
    }
    stage(&mut tally, "unit tests", |tally| unit(tally, args, &progress));
    // Both are needed by what follows; each says what it lacks.
    let built = stage(&mut tally, "release build", |_| binaries::build(&progress));
    let made = stage(&mut tally, "guest images", |_| images::ensure_all(&progress));
    if built && made {
        let suite = |peers| Suite {
            peers,
            long: false,
            filter: args.filter.as_deref(),
        };
        stage(&mut tally, "end to end", |tally| {
            end_to_end(tally, &suite(None), &progress)
        });
        if args.peers {
            stage(&mut tally, "peers", |tally| {
                let peers = upstream::ensure(&progress)?;
                end_to_end(tally, &suite(Some(peers)), &progress)
            });
        }
    } else {
        tally.fail("end to end", "not run, for want of the above");
    }
    println!("{}", tally.closing());
    Ok(if tally.good() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Arguments of `cargo xtask soak`.
#[derive(clap::Args, Debug)]
pub struct SoakArgs {
    /// Run only those whose name contains this
    filter: Option<String>,
}

/// Runs `cargo xtask soak`: the cases that take too long for the tests.
pub fn soak(args: &SoakArgs) -> Result<ExitCode> {
    let progress = Progress::new();
    let mut tally = Tally::default();
    binaries::build(&progress)?;
    images::ensure_all(&progress)?;
    let suite = Suite {
        peers: None,
        long: true,
        filter: args.filter.as_deref(),
    };
    stage(&mut tally, "soak", |tally| end_to_end(tally, &suite, &progress));
    println!("{}", tally.closing());
    Ok(if tally.good() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Which of the cases with real guests are run.
#[derive(Debug)]
struct Suite<'a> {
    /// Where the peers are, if the cases are those with peers.
    peers: Option<PathBuf>,
    long: bool,
    filter: Option<&'a str>,
}

impl Suite<'_> {
    /// Arguments of `husk-e2e` for all of them.
    fn words(&self) -> Vec<String> {
        let flags = [("--peers", self.peers.is_some()), ("--long", self.long)];
        let wanted = flags.into_iter().filter(|&(_, wanted)| wanted);
        wanted.map(|(flag, _)| flag.to_owned()).collect()
    }

    /// The longest a case may take: what hangs longer has not ended by its own limit.
    fn case_limit(&self) -> Duration {
        if self.long { SOAK_LIMIT } else { CASE_LIMIT }
    }

    fn limit(&self) -> Duration {
        if self.long {
            Duration::MAX
        } else {
            END_TO_END_LIMIT
        }
    }
}

/// Runs the stage `name`, times it, and counts its error; whether it did well.
fn stage(tally: &mut Tally, name: &str, work: impl FnOnce(&mut Tally) -> Result<()>) -> bool {
    println!("== {name}");
    let started = Instant::now();
    let failed = tally.failed;
    let result = work(tally);
    let seconds = started.elapsed().as_secs_f64();
    match result {
        Ok(()) => println!("== {name}: {seconds:.1} s"),
        // A stage whose failed tests are counted already is not counted once more.
        Err(error) if tally.failed > failed => println!("== {name}: {error:#}, after {seconds:.1} s"),
        Err(error) => tally.fail(name, &format!("{error:#}")),
    }
    tally.failed == failed
}

/// A cargo in the checkout.
fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(checkout::root());
    command
}

fn succeed(command: &mut Command) -> Result<()> {
    let status = command
        .stdin(Stdio::null())
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("{status}");
    }
    Ok(())
}

/// All tests of all crates, by cargo.
fn unit(tally: &mut Tally, args: &Args, progress: &Progress) -> Result<()> {
    packages::ensure(progress, &TOOLS_OF_CRATES)?;
    let mut test = cargo(&["test", "--workspace", "--no-fail-fast"]);
    if let Some(filter) = &args.filter {
        test.args(["--", filter]);
    }
    let mut child = test
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).into_owned();
            println!("{line}");
            tally.libtest(&line);
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("cargo test: {status}");
    }
    Ok(())
}

/// The suite that boots real guests, in the lab or on this machine: one command for each case, so that a lab
/// that is lost costs the case it was lost in one more try, in a new lab, and no other.
fn end_to_end(tally: &mut Tally, which: &Suite<'_>, progress: &Progress) -> Result<()> {
    if native_kvm() {
        packages::ensure(progress, &TOOLS)?;
    }
    // Copies, so that a build meanwhile does not change what is tested.
    let frozen = tempfile::Builder::new()
        .prefix("e2e-")
        .tempdir_in(lab::share()?)?;
    for binary in [
        "husk",
        "husk-vmm",
        "containerd-shim-husk-v2",
        "husk-e2e",
        "husk-flow",
    ] {
        let built = checkout::release().join(binary);
        std::fs::copy(&built, frozen.path().join(binary))
            .with_context(|| format!("the release build made no {}", built.display()))?;
    }
    // The cases also run as users, who need the way in.
    std::fs::set_permissions(frozen.path(), PermissionsExt::from_mode(0o755))?;
    let suite = frozen.path().join("husk-e2e");
    let listed = Command::new(&suite)
        .args(which.words())
        .arg("--list")
        .output()
        .with_context(|| format!("cannot run {}", suite.display()))?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let wanted = |case: &&str| which.filter.is_none_or(|filter| case.contains(filter));
    let cases: Vec<&str> = listed
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(wanted)
        .collect();
    if cases.is_empty() && (which.long || which.filter.is_none()) {
        bail!("the suite lists no cases");
    }
    let started = Instant::now();
    let (mut lost, mut again) = (0, Vec::new());
    for case in cases {
        let in_lab = case.starts_with(NEED_THE_LAB) || !native_kvm();
        let tries = if in_lab { TRIES_IN_THE_LAB } else { 1 };
        let mut tried = 0;
        loop {
            let mut counts = Tally::default();
            match end_to_end_case(&mut counts, which, progress, &suite, case, in_lab) {
                Ok(status) if INTERRUPTED.contains(&status) => bail!("interrupted in {case}"),
                Ok(_) => {}
                Err(error) => {
                    lost += 1;
                    if lost > LABS_LOST || started.elapsed() > which.limit() {
                        return Err(error.context(case.to_owned()));
                    }
                    println!("the lab was lost in {case} ({error:#}): once more in a new one");
                    continue;
                }
            }
            tried += 1;
            if counts.failed == 0 || tried == tries || started.elapsed() > which.limit() {
                tally.add(counts);
                break;
            }
            println!("{case} failed in the lab, at try {tried} of {tries}: once more in a new one");
            again.push(case);
            // What broke the guest has often hit the lab's kernel and its page cache as well.
            if let Err(error) = lab::renew() {
                println!("the lab stays: {error:#}");
            }
        }
    }
    if !again.is_empty() {
        println!(
            "tried again, because the lab's guests fail now and then: {}",
            again.join(", ")
        );
    }
    Ok(())
}

/// One case and its status. Its failure is counted; an error is the lab's.
fn end_to_end_case(
    tally: &mut Tally,
    which: &Suite<'_>,
    progress: &Progress,
    suite: &Path,
    case: &str,
    in_lab: bool,
) -> Result<u8> {
    let mut words = vec![
        suite.to_string_lossy().into_owned(),
        "--exact".into(),
        case.into(),
    ];
    words.extend(which.words());
    let mut closed = false;
    let mut command = lab::Command::new(words);
    if let Some(peers) = &which.peers {
        let peers = peers.to_string_lossy().into_owned();
        command.env.push(("HUSK_PEERS".to_owned(), peers));
    }
    let status = command
        .timeout(which.case_limit())
        .in_lab(in_lab)
        .lines(progress, |line| {
            if tally.end_to_end(line) {
                closed = true;
            } else {
                println!("{line}");
            }
        })?;
    if status == lab::TIMED_OUT {
        tally.fail(
            case,
            &format!("not done after {} s", which.case_limit().as_secs()),
        );
    } else if !closed {
        tally.fail(case, &format!("it ended early, with status {status}"));
    }
    Ok(status)
}
