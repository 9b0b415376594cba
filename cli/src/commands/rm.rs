//! `husk rm`.

use husk_monitor::state::RuntimeDir;

use crate::failure::{Failure, RUNTIME};
use crate::live_vm;
use crate::shutdown::{StopMode, stop_all};
use crate::vm_ref::VmRef;

/// Remove VMs: end those that run, and clear away what dead ones left
///
/// As `kubectl delete vmi`: a running VM is shut down within its grace period first. A VM that has ended leaves
/// nothing to remove, unless its monitor was killed; that is cleared away too. Disk images are never touched, but
/// for emptyDisks and the changes to containerDisks, which end with their VM.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 when nothing of the VMs is left, with --force also if there was nothing; 1 after all the others if one
was not there or could not be ended.

Examples:
  husk rm demo test/other
  husk rm --force demo")]
pub(crate) struct Args {
    /// The VMs: NAME or NAMESPACE/NAME
    #[arg(value_name = "VM", required = true)]
    vms: Vec<VmRef>,

    /// Kill running VMs at once, and do not mind names that are not there
    #[arg(short, long)]
    force: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let runtime = RuntimeDir::locate()?;
    let is_live = |vm: &VmRef| runtime.find(&vm.namespace, &vm.name).is_ok();
    let lived: Vec<_> = args.vms.iter().map(is_live).collect();
    let removed: Vec<_> = runtime.remove_abandoned()?.iter().map(live_vm::vm_ref).collect();
    let (mut running, mut done) = (Vec::new(), Ok(()));
    for (vm, lived) in args.vms.iter().zip(lived) {
        if let Ok(dir) = runtime.find(&vm.namespace, &vm.name) {
            running.push(Ok(dir));
        } else if let Err(error) = runtime.clear(&vm.namespace, &vm.name) {
            Failure::from(error).report();
            done = Err(Failure::Ended(RUNTIME));
        } else if removed.contains(vm) {
            eprintln!("{vm}: removed what its monitor had left");
        } else if !lived && !args.force {
            // Says what is wrong; one that ended just now has left nothing to remove.
            if let Err(failure) = live_vm::find(vm) {
                failure.report();
                done = Err(Failure::Ended(RUNTIME));
            }
        }
    }
    let mode = if args.force {
        StopMode::Force
    } else {
        StopMode::Graceful(None)
    };
    live_vm::block_on(stop_all(running, mode))?;
    done
}
