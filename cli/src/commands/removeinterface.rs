//! `husk removeinterface`.

use husk_proto::shim::v1::RemoveInterfaceRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Remove a network interface that was added by `husk addinterface`
///
/// Asks the guest to release the interface and returns when the device in the VM's network namespace is restored. A
/// guest that is booting or paused releases it later.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Name of the interface
    name: String,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let request = RemoveInterfaceRequest {
        name: args.name.clone(),
    };
    live_vm::block_on(async {
        live_vm::connect(&args.vm)
            .await?
            .remove_interface(request)
            .await?;
        eprintln!("{}: removed interface {}", args.vm, args.name);
        Ok(())
    })
}
