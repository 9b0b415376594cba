//! `husk start` and `husk restart`.

use husk_objects::{ObjectError, StoredObject};
use husk_vmi::objects::RunStrategy;

use super::apply::wait::Waits;
use crate::failure::{Failure, RUNTIME};
use crate::machine::systemd::Systemd;
use crate::machine::{Machine, unit, vm};
use crate::vm_ref::VmRef;

/// Start VMs of the store
///
/// A VM whose run strategy is Halted gets the strategy Always, as with `virtctl start`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if all VMs run, 1 if one does not.

Example:
  husk start demo test/other")]
pub(crate) struct StartArgs {
    /// The VMs: NAME or NAMESPACE/NAME
    #[arg(value_name = "VM", required = true)]
    vms: Vec<VmRef>,

    /// Return before they run
    #[arg(long)]
    no_wait: bool,
}

/// Shut down VMs of the store and start them again
///
/// Changes of a VM that cannot be made while it runs take effect.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if all VMs run again, 1 if one does not.

Example:
  husk restart demo")]
pub(crate) struct RestartArgs {
    /// The VMs: NAME or NAMESPACE/NAME
    #[arg(value_name = "VM", required = true)]
    vms: Vec<VmRef>,

    /// Return before they run
    #[arg(long)]
    no_wait: bool,
}

pub(super) fn start(args: &StartArgs) -> Result<(), Failure> {
    each(&args.vms, args.no_wait, |machine, systemd, name, stored| {
        let unit = systemd.vm(name)?;
        if unit.runs() {
            return Err(Failure::Runtime(format!(
                "{name} runs already, or is being started"
            )));
        }
        let strategy = vm::run_strategy(stored);
        if strategy == RunStrategy::Halted {
            machine
                .objects
                .edit(&stored.key, |object| vm::set_runs(object, true))?;
        }
        if matches!(
            strategy,
            RunStrategy::Halted | RunStrategy::Always | RunStrategy::RerunOnFailure
        ) {
            systemd.enable(name, true)?;
        }
        systemd.start(name)?;
        Ok(unit.pid)
    })
}

pub(super) fn restart(args: &RestartArgs) -> Result<(), Failure> {
    each(&args.vms, args.no_wait, |_, systemd, name, _| {
        let unit = systemd.vm(name)?;
        if !unit.runs() {
            return Err(Failure::Runtime(format!(
                "{name} does not run: `husk start {name}`"
            )));
        }
        systemd.restart(name)?;
        Ok(unit.pid)
    })
}

/// Does something with each VM, and waits until all run. `begin` returns the id of a process that ends before.
fn each(
    vms: &[VmRef],
    no_wait: bool,
    begin: impl Fn(&Machine, Systemd, &VmRef, &StoredObject) -> Result<String, Failure>,
) -> Result<(), Failure> {
    let machine = Machine::locate()?;
    let systemd = Systemd::find()?;
    unit::install(systemd)?;
    let mut waits = Waits::default();
    let mut failed = false;
    for name in vms {
        match stored(&machine, name).and_then(|stored| begin(&machine, systemd, name, &stored)) {
            Ok(pid) => waits.restart(name.clone(), pid),
            Err(failure) => {
                failure.report();
                failed = true;
            }
        }
    }
    if !no_wait {
        waits.until_done(&machine, systemd)?;
    }
    match failed {
        true => Err(Failure::Ended(RUNTIME)),
        false => Ok(()),
    }
}

/// The VM of this name in the store.
fn stored(machine: &Machine, name: &VmRef) -> Result<StoredObject, Failure> {
    machine.vm(name).map_err(|error| match error {
        ObjectError::NotFound(_) => Failure::Runtime(format!(
            "no VM {name} is in the store: `husk get vm --all-namespaces` shows them"
        )),
        error => error.into(),
    })
}
