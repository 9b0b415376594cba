//! `husk reset`.

use husk_proto::shim::v1::ResetRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Reset a VM without asking the guest, as a PC's reset button does
///
/// The guest boots again in the same VM, from the kernel its disk carries by then. What it had not written to its
/// disks is lost: prefer the guest's own `reboot`.
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
