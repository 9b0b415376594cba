//! `husk soft-reboot`.

use husk_proto::shim::v1::SoftRebootRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Ask a guest to shut down, and boot it again in the same VM
///
/// Presses the power button. When the guest has powered off, within five minutes, the VM boots again in place of ending.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    live_vm::block_on(async {
        let mut client = live_vm::connect(&args.vm).await?;
        client.soft_reboot(SoftRebootRequest {}).await?;
        eprintln!("{}: power button pressed, to reboot", args.vm);
        Ok(())
    })
}
