//! `husk rm`.

use husk_shim::state::{RuntimeDir, StateError};

use crate::ending::{How, end_all};
use crate::failure::Failure;
use crate::pod;
use crate::vm_ref::VmRef;

/// Remove VMs: end those that run, and clear away what dead ones left
///
/// As `kubectl delete vmi`: a running VM is shut down within its grace period first. A VM that has ended leaves
/// nothing to remove, unless its monitor was killed; that is cleared away too. Disk images are never touched, but
/// for emptyDisks and the changes to containerDisks, which end with their VM.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 when nothing of the VMs is left; with --force also if there was nothing.

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
    let state = |vm: &VmRef| runtime.path().join(&vm.namespace).join(&vm.name);
    let had_state: Vec<_> = args.vms.iter().map(|vm| state(vm).exists()).collect();
    runtime.sweep()?;
    let mut running = Vec::new();
    for (vm, had_state) in args.vms.iter().zip(had_state) {
        match runtime.find(&vm.namespace, &vm.name) {
            Ok(_) => running.push(vm.clone()),
            Err(StateError::NotFound { .. }) if had_state && !state(vm).exists() => {
                eprintln!("{vm}: removed what its monitor had left");
            }
            Err(StateError::NotFound { .. }) if args.force => {}
            Err(_) => {
                pod::find(vm)?;
            }
        }
    }
    let how = if args.force {
        How::ByForce
    } else {
        How::Gracefully(None)
    };
    pod::block_on(end_all(&running, how))
}
