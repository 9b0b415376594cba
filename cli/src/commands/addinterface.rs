//! `husk addinterface`.

use husk_proto::shim::v1::AddInterfaceRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Give a running VM one more network interface
///
/// It is bound, by the bridge binding, to a device that the VM's network namespace has got meanwhile, so the VM is one
/// that was started with --netns. The guest has it until `husk removeinterface` or its end. Adding the same interface
/// again does nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk addinterface demo blue
  husk addinterface demo blue --device net1 --mac 02:00:00:00:00:10")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// What the interface is called
    name: String,

    /// The device; else podHASH, HASH being the first 11 digits of the SHA-256 of NAME
    #[arg(long, value_name = "DEVICE", default_value = "", hide_default_value = true)]
    device: String,

    /// The guest's Ethernet address; else the device's
    #[arg(long, value_name = "ADDRESS", default_value = "", hide_default_value = true)]
    mac: String,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let request = AddInterfaceRequest {
        name: args.name.clone(),
        device: args.device.clone(),
        mac: args.mac.clone(),
    };
    live_vm::block_on(async {
        live_vm::connect(&args.vm).await?.add_interface(request).await?;
        eprintln!("{}: added interface {}", args.vm, args.name);
        Ok(())
    })
}
