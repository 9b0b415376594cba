//! `husk removeinterface`.

use husk_proto::shim::v1::RemoveInterfaceRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Take a network interface away that `husk addinterface` gave
///
/// The guest is asked to give it up. Done when the device is in the VM's network namespace again as it was found. A
/// guest that does not answer, as it boots or is paused, gives it up later.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// What the interface is called
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
