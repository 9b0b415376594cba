//! `husk stop`.

use husk_monitor::state::RuntimeDir;
use husk_objects::ObjectError;
use husk_vmi::objects::RunStrategy;

use super::apply::wait::Waits;
use crate::failure::Failure;
use crate::live_vm;
use crate::machine::systemd::Systemd;
use crate::machine::{FirstStart, Machine, vm};
use crate::shutdown::{StopMode, stop_all};
use crate::vm_ref::VmRef;

/// Shut down VMs and wait until they have ended
///
/// Presses the ACPI power button and kills the VM if it is still running after the grace period, which is
/// terminationGracePeriodSeconds of the manifest. A VM of the store with the run strategy Always gets the strategy
/// Halted, as with `virtctl stop`. Ctrl-C ends the wait, not the shutdown.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if all VMs have ended, gracefully or not.

Examples:
  husk stop demo
  husk stop demo --grace-period 120
  husk stop demo --force")]
pub(crate) struct Args {
    /// The VMs: NAME or NAMESPACE/NAME
    #[arg(value_name = "VM", required = true)]
    vms: Vec<VmRef>,

    /// Grace period in seconds, instead of that of the manifest; 0 kills at once
    #[arg(short, long, value_name = "SECONDS")]
    grace_period: Option<u64>,

    /// Kill the VMs at once; data not yet written to their disks is lost
    #[arg(short, long, conflicts_with = "grace_period")]
    force: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let mode = if args.force {
        StopMode::Force
    } else {
        StopMode::Graceful(args.grace_period)
    };
    let machine = Machine::locate()?;
    let mut waits = Waits::default();
    let (mut systemd, mut running) = (None, Vec::new());
    for name in &args.vms {
        if is_supervised(&machine, name)? {
            systemd = Some(Systemd::find()?);
            waits.stops.push(name.clone());
        } else {
            running.push(live_vm::find(name));
        }
    }
    let Some(systemd) = systemd else {
        return live_vm::block_on(stop_all(running, mode));
    };
    for name in &waits.stops {
        systemd.enable(name, false)?;
        systemd.stop(name)?;
    }
    // systemd has asked for a shutdown within the grace period of the manifest. It may be shorter.
    if !matches!(mode, StopMode::Graceful(None)) {
        let runtime = RuntimeDir::locate()?;
        let found = waits
            .stops
            .iter()
            .filter_map(|name| runtime.find(&name.namespace, &name.name).ok());
        running.extend(found.map(Ok));
    }
    let stopped = live_vm::block_on(stop_all(running, mode));
    waits.until_done(&machine, systemd)?;
    stopped
}

/// Sees to it that a VM of the store does not start again. False if systemd does not run it: then it is not of the
/// store, or `husk run` started it.
fn is_supervised(machine: &Machine, name: &VmRef) -> Result<bool, Failure> {
    let stored = match machine.vm(name) {
        Err(ObjectError::NotFound(_)) => return Ok(false),
        found => found?,
    };
    let Ok(systemd) = Systemd::find() else {
        return Ok(false);
    };
    let unit = systemd.vm(name)?;
    if !unit.runs() && !unit.is_stopping() && live_vm::find(name).is_ok() {
        return Ok(false);
    }
    if vm::run_strategy(&stored) == RunStrategy::Always {
        machine
            .objects
            .edit(&stored.key, |object| vm::set_runs(object, false))?;
    }
    FirstStart::of(machine, &stored.key).clear()?;
    Ok(true)
}
