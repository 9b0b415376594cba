//! `husk reset`.

use husk_proto::shim::v1::ResetRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Reset a VM, like the reset button of a PC
///
/// The guest is not asked and loses all data not yet written to its disks: prefer `reboot` in the guest. It boots again
/// in the same VM, from the kernel that is on its disk by then.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    live_vm::block_on(async {
        live_vm::connect(&args.vm).await?.reset(ResetRequest {}).await?;
        eprintln!("{}: reset", args.vm);
        Ok(())
    })
}
