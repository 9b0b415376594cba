//! The lab: one Debian VM with a real `/dev/kvm`, shared by all commands of this checkout.
//!
//! Where the machine runs guests natively there is no lab: the same commands run on the machine itself.

mod boot;
pub mod counted;
mod disk_space;
mod hang_report;
mod image;
mod local;
mod reboot;
mod remote;
mod run;
mod signals;
mod snapshot;
mod ssh;
mod state;

use crate::exit_code;
use crate::native::native_kvm;
use crate::progress::Progress;
use crate::qmp::Qmp;
use anyhow::Result;
use clap::Subcommand;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

pub use boot::detach;
pub use reboot::{End, reboot};
pub use run::{Command, TIMED_OUT, share};
pub use signals::{SignalSet, exit_on_signals};
pub use state::Process;

/// Exit status of `lab run` if the command could not be run, or the lab was lost while it ran.
const NOT_RUN: u8 = 125;

/// Arguments of `cargo xtask lab`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Number of the lab: `cargo xtask test` uses both of a checkout
    #[arg(long, value_name = "N", default_value_t = 1, global = true, value_parser = clap::value_parser!(u32).range(1..=i64::from(state::LABS)))]
    lab: u32,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Boots the lab, unless it is booted
    Up,
    /// Makes the lab's system, which needs root, without booting it
    Image,
    /// Shuts the lab down
    Down {
        /// Shut it down even if commands run in it
        #[arg(long)]
        force: bool,
    },
    /// Reboots the lab, which keeps its disk; ends commands that run in it
    Reboot {
        /// Reset it at once, as a power cut does
        #[arg(long)]
        power_cut: bool,
    },
    /// Reports if the lab answers; exits with 1 if not
    Status,
    /// Opens a root shell in the lab
    Shell,
    /// Runs a command as root in the lab, and passes on its exit status, output and input
    Run {
        /// Time limit in seconds, after which the command is ended with status 124
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<f64>,
        /// Give the command a terminal
        #[arg(short, long)]
        tty: bool,
        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

/// Shuts lab `number` down if no command runs in it. The next command boots a new one.
///
/// # Errors
/// Fails if a command runs in it or it cannot be ended.
pub fn renew(number: u32) -> Result<()> {
    boot::down(number, false)
}

/// Makes the lab's disk image, unless it is in the cache.
///
/// # Errors
/// Fails if the image has to be made and this is not root.
pub fn ensure_image(progress: &Progress) -> Result<()> {
    image::ensure(progress).map(drop)
}

/// Path of a program in the lab's system, such as `usr/bin/busybox`.
pub fn program(progress: &Progress, path: &str) -> Result<PathBuf> {
    Ok(image::ensure(progress)?.root().join(path))
}

/// Boots lab `number` again, with one more NIC that QEMU connects to this machine's tap `tap`.
pub fn up_with_nic(progress: &Progress, number: u32, tap: &str, mac: &str) -> Result<()> {
    boot::down(number, false)?;
    let lab = boot::up(progress, number)?;
    let mut qmp = Qmp::connect(&lab.sockets.join("qmp"))?;
    qmp.execute(
        "netdev_add",
        json!({ "type": "tap", "id": "bridged", "ifname": tap, "script": "no", "downscript": "no" }),
    )?;
    qmp.execute(
        "device_add",
        json!({ "driver": "virtio-net-pci", "netdev": "bridged", "mac": mac, "romfile": "", "bus": "port-nic" }),
    )?;
    Ok(())
}

/// Ends lab `number` with all commands in it.
pub fn end(number: u32) -> Result<()> {
    boot::down(number, true)
}

/// Number of labs that this machine has processors and memory for.
pub fn affordable() -> u32 {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let memory = boot::machine_mib().unwrap_or_default();
    if processors >= 2 && memory >= 14 << 10 {
        state::LABS
    } else {
        1
    }
}

/// CPU time that the QEMU of lab `number` has used so far, if it runs.
pub fn cpu_time(number: u32) -> Option<Duration> {
    state::LabFolder::find(number).ok()?.read()?.qemu.cpu_time()
}

/// Serial console log of lab `number`.
pub fn serial_log(number: u32) -> Result<PathBuf> {
    Ok(state::LabFolder::find(number)?.file("serial.log"))
}

/// Runs `cargo xtask lab`; returns the command's exit status.
pub fn run(args: Args) -> Result<ExitCode> {
    let progress = Progress::on_stderr();
    match args.action {
        Action::Up => {
            if native_kvm() {
                eprintln!("guests run natively on this machine: no lab is needed");
            } else {
                boot::up(&progress, args.lab)?;
            }
        }
        Action::Image => {
            image::ensure(&progress)?;
        }
        Action::Down { force } => boot::down(args.lab, force)?,
        Action::Reboot { power_cut } => {
            let end = if power_cut { End::PowerCut } else { End::ShutDown };
            reboot(&progress, args.lab, end)?;
        }
        Action::Status => return status(args.lab),
        Action::Shell => {
            let mut shell = Command::new(["bash", "-l"]);
            shell.tty = true;
            shell.lab = args.lab;
            return Ok(exit(shell.status(&progress)));
        }
        Action::Run {
            timeout,
            tty,
            command,
        } => {
            let mut run = Command::new(command);
            run.tty = tty;
            run.lab = args.lab;
            run.timeout = timeout.map(Duration::try_from_secs_f64).transpose()?;
            return Ok(exit(run.status(&progress)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The exit status of a command that was run, or 125 if it could not be.
fn exit(status: Result<u8>) -> ExitCode {
    ExitCode::from(status.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        NOT_RUN
    }))
}

fn status(number: u32) -> Result<ExitCode> {
    if native_kvm() {
        println!("native: guests run on this machine itself");
        return Ok(ExitCode::SUCCESS);
    }
    let dir = state::LabFolder::find(number)?;
    let Some(lab) = dir.read() else {
        println!("down");
        return Ok(ExitCode::FAILURE);
    };
    if !lab.alive() {
        println!("dead: pid {} is gone", lab.qemu.pid);
        return Ok(ExitCode::FAILURE);
    }
    if !lab.booted {
        println!(
            "booting: pid {}, logs in {}",
            lab.qemu.pid,
            dir.folder().display()
        );
        return Ok(ExitCode::FAILURE);
    }
    let answers = ssh::answers(&lab, Duration::from_secs(30));
    println!(
        "{}: pid {}, ssh port {}, up {} s, {} commands in it, logs in {}",
        if answers { "up" } else { "hung" },
        lab.qemu.pid,
        lab.port,
        lab.uptime().as_secs(),
        dir.users(),
        dir.folder().display()
    );
    Ok(exit_code(answers))
}
