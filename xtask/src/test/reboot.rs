//! `cargo xtask reboot`: a machine with VMs that `husk apply` keeps is rebooted, and loses its power.

use super::stages::{Stage, Stages};
use super::suite::{Case, Suite, Tier};
use crate::binaries::Profile;
use crate::lab::{self, End};
use crate::progress::Progress;
use crate::{binaries, images};
use anyhow::{Result, bail};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Number of the lab.
const LAB: u32 = 1;
/// VMs beside which the power is cut. They only have to start again.
const BESIDE_POWER_CUTS: u32 = 3;
/// What [`phase`] sees once `host-changes` changes something.
const FIRST_CHANGE: &str = "done: ";
/// Maximum time until then.
const PREPARED: Duration = Duration::from_secs(120);

/// Arguments of `cargo xtask reboot`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// VMs that run when the lab is rebooted
    #[arg(long, value_name = "N", default_value_t = 20)]
    vms: u32,
    /// Times that the power is cut while objects, volumes and images change
    #[arg(long, value_name = "N", default_value_t = 10)]
    power_cuts: u32,
    /// Use the existing binaries
    #[arg(long)]
    no_build: bool,
}

/// Runs `cargo xtask reboot`; fails if anything failed.
pub fn run(args: &Args) -> Result<ExitCode> {
    lab::exit_on_signals()?;
    let progress = Progress::on_stderr();
    if !args.no_build {
        binaries::build(Profile::EndToEnd, &progress)?;
    }
    images::ensure_default(&progress)?;
    let machine = Machine {
        suite: Suite::copy(Profile::EndToEnd)?,
        progress,
    };
    let stages = Stages::new();
    lab::renew(LAB)?;
    if args.vms > 0 {
        stages.run("reboot", |stage| machine.reboot(stage, args.vms));
    }
    if args.power_cuts > 0 {
        stages.run("power cuts", |stage| machine.power_cuts(stage, args.power_cuts));
    }
    // Its services and its journal are no longer those of a new lab.
    lab::renew(LAB)?;
    Ok(super::exit_code(stages.close()))
}

struct Machine {
    suite: Suite,
    progress: Progress,
}

impl Machine {
    fn reboot(&self, stage: &mut Stage, vms: u32) -> Result<()> {
        self.set_up(stage, vms)?;
        self.phase(stage, "host-removal", vms)
    }

    /// Sets VMs up, and reboots the lab.
    fn set_up(&self, stage: &mut Stage, vms: u32) -> Result<()> {
        self.phase(stage, "host-setup", vms)?;
        lab::reboot(&self.progress, LAB, End::ShutDown)?;
        self.phase(stage, "host-rebooted", vms)
    }

    fn power_cuts(&self, stage: &mut Stage, cuts: u32) -> Result<()> {
        self.set_up(stage, BESIDE_POWER_CUTS)?;
        for cut in 1..=cuts {
            // Another moment each time, within about two rounds of the changes.
            let nanos = jiff::Timestamp::now().subsec_nanosecond().unsigned_abs();
            let delay = Duration::from_millis(u64::from(nanos) % 30_000);
            println!(
                "power cut {cut} of {cuts}, {:.1} s after the first change",
                delay.as_secs_f64()
            );
            self.cut_during_changes(delay)?;
            self.phase(stage, "host-power-cut", BESIDE_POWER_CUTS)?;
        }
        self.phase(stage, "host-removal", BESIDE_POWER_CUTS)
    }

    /// Runs a phase that is to pass.
    fn phase(&self, stage: &mut Stage, name: &str, vms: u32) -> Result<()> {
        let status = self.command(name, vms).lines(&self.progress, |line| {
            if !stage.tally.end_to_end(line) {
                println!("{line}");
            }
        })?;
        if status != 0 {
            bail!("{name} failed");
        }
        Ok(())
    }

    /// Cuts the power `delay` after the first change is done.
    fn cut_during_changes(&self, delay: Duration) -> Result<()> {
        let command = self.command("host-changes", BESIDE_POWER_CUTS);
        let (seen, first) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let changes = scope.spawn(move || {
                let mut output = String::new();
                let status = command.lines(&self.progress, |line| {
                    output.push_str(line);
                    output.push('\n');
                    if line.trim_start().starts_with(FIRST_CHANGE) {
                        let _ = seen.send(());
                    }
                });
                (status, output)
            });
            let begun = first.recv_timeout(PREPARED);
            if begun == Err(RecvTimeoutError::Disconnected) || changes.is_finished() {
                let (_, output) = changes.join().unwrap_or((Ok(0), String::new()));
                bail!("the changes ended by themselves:\n{output}");
            }
            std::thread::sleep(delay);
            let early = changes.is_finished();
            lab::reboot(&self.progress, LAB, End::PowerCut)?;
            let (_, output) = changes.join().unwrap_or((Ok(0), String::new()));
            if early {
                bail!("the changes ended by themselves:\n{output}");
            }
            Ok(())
        })
    }

    fn command(&self, name: &str, vms: u32) -> lab::Command {
        let case = Case {
            name: name.to_owned(),
            tier: Tier::Host,
        };
        let mut command = self.suite.command(&case).in_lab(true);
        command.lab = LAB;
        command.env.push(("HUSK_VMS".to_owned(), vms.to_string()));
        command
    }
}
