//! Lints and the tests that run on this machine without guests, built once by cargo.

use super::stages::Stage;
use crate::binaries::{self, Profile};
use crate::checkout;
use crate::native::native_kvm;
use crate::packages::{self, Tool, tool};
use crate::progress::{Progress, ends_with_this_process, wait_with_cpu};
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group, setsid};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Commands that unit tests run: they set up a pod's network as a plugin does, a guest that requests a lease, and the
/// agent of a guest.
const TOOLS: [Tool; 5] = [
    tool("ip", "iproute2"),
    tool("busybox", "busybox"),
    tool("nft", "nftables"),
    tool("tcpdump", "tcpdump"),
    tool("qemu-ga", "qemu-guest-agent"),
];

/// Maximum time of all tests of the crates. They run at low priority, and on a slow machine only once the labs are done.
const TEST_LIMIT: Duration = Duration::from_secs(45 * 60);

/// Devices of the kernel's vhost, and part of the names of the tests that need each.
const VHOST: [(&str, &str); 2] = [
    ("/dev/vhost-net", "vhost_net::"),
    ("/dev/vhost-vsock", "vhost_vsock::"),
];

/// Part of the names of the tests that need a KVM which runs guest kernel mode natively.
const NATIVE_KVM: &str = "native_kvm::";

/// A cargo command in the checkout that ends with this process.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = checkout::cargo();
    command
        .args(arguments)
        .current_dir(checkout::root())
        .stdin(Stdio::null());
    ends_with_this_process(&mut command);
    command
}

/// Runs `command` in a session of its own with the lowest priority, because the labs need the processors more.
///
/// A session has a scheduling group of its own (`sched_autogroup_enabled`), and a nice value counts within its group
/// only, so both are set.
pub fn in_background(command: &mut Command) {
    // SAFETY: only system calls; the standard library's calls for the file do not allocate for a constant path.
    unsafe {
        command.pre_exec(|| {
            setsid()?;
            let file = libc::open(c"/proc/self/autogroup".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if file >= 0 {
                libc::write(file, c"10".as_ptr().cast(), 2);
                libc::close(file);
            }
            libc::setpriority(libc::PRIO_PROCESS, 0, 10);
            Ok(())
        });
    }
}

/// Makes clippy compile the workspace's crates, so that one build serves the lints and the tests: `clippy-driver` is
/// rustc with lints. Dependencies are compiled by rustc itself, and shared with this program's own build.
pub fn with_lints(command: &mut Command) {
    command
        .env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver")
        // As `cargo clippy -- -D warnings` sets it.
        .env("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__");
}

/// Builds every target of every crate with clippy's lints as errors. The programs among them are those of the end-to-end
/// tests.
pub fn build(stage: &mut Stage, lints: bool) -> Result<()> {
    let mut build = cargo(&["build", "--workspace", "--all-targets", "--quiet"]);
    build.args(binaries::static_arguments());
    if lints {
        with_lints(&mut build);
    }
    let status = stage.command(&mut build)?;
    if !status.success() {
        bail!("cargo build: {status}");
    }
    binaries::place_others(Profile::EndToEnd)
}

/// Runs the tests of all crates. Those that `build` compiled are not compiled again.
pub fn test(stage: &mut Stage, lints: bool, filter: Option<&str>, progress: &Progress) -> Result<()> {
    packages::ensure(progress, &TOOLS)?;
    let mut test = cargo(&["test", "--workspace", "--all-targets", "--no-fail-fast"]);
    test.args(binaries::static_arguments()).arg("--");
    if lints {
        with_lints(&mut test);
    }
    in_background(&mut test);
    if privileged() {
        test.arg("--include-ignored");
        for (device, tests) in VHOST {
            if !Path::new(device).exists() {
                test.args(["--skip", tests]);
            }
        }
        if !native_kvm() {
            test.args(["--skip", NATIVE_KVM]);
        }
    }
    test.args(filter);
    let (reader, writer) = std::io::pipe()?;
    test.stdout(writer.try_clone()?).stderr(writer);
    let mut child = test.spawn().context("cannot start cargo")?;
    // The reader ends when the last writer is closed, and the command holds two.
    drop(test);
    let watchdog = Watchdog::start(Pid::from_child(&child));
    let (mut programs, mut closed) = (0, 0);
    for line in BufReader::new(reader).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        println!("{line}");
        programs += u32::from(line.starts_with("     Running "));
        closed += u32::from(stage.tally.libtest(&line, filter.is_none()));
    }
    let (status, cpu) = wait_with_cpu(&mut child)?;
    stage.cpu += cpu;
    if watchdog.stop() {
        bail!("not done after {} minutes", TEST_LIMIT.as_secs() / 60);
    }
    if programs != closed {
        stage.tally.fail(
            "unit tests",
            &format!("{programs} programs ran and {closed} said how many tests passed"),
        );
    }
    if !status.success() {
        bail!("cargo test: {status}");
    }
    Ok(())
}

/// Kills the tests' session if they take too long: one that hangs would keep the others from being reported.
struct Watchdog {
    done: mpsc::Sender<()>,
    thread: JoinHandle<bool>,
}

impl Watchdog {
    /// Watches the session of the process `leader`.
    fn start(leader: Pid) -> Self {
        let (done, is_done) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let late = is_done.recv_timeout(TEST_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout);
            if late {
                let _ = kill_process_group(leader, Signal::KILL);
            }
            late
        });
        Self { done, thread }
    }

    /// Ends the watch. Returns whether the tests were killed.
    fn stop(self) -> bool {
        drop(self.done);
        self.thread.join().unwrap_or(false)
    }
}

/// True if tests marked `#[ignore = "needs …"]` can run here: they need root, KVM and TAP devices.
fn privileged() -> bool {
    rustix::process::geteuid().is_root()
        && ["/dev/kvm", "/dev/net/tun"]
            .iter()
            .all(|path| Path::new(path).exists())
}
