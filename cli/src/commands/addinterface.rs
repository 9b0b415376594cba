//! `husk addinterface`.

use husk_proto::shim::v1::AddInterfaceRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Add a network interface to a running VM
///
/// The interface uses the bridge binding on a device that was added to the VM's network namespace, so the VM must have
/// been started with --netns. It stays until `husk removeinterface` or the end of the VM. Adding the same interface
/// again does nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk addinterface demo blue
  husk addinterface demo blue --device net1 --mac 02:00:00:00:00:10")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Name of the interface
    name: String,

    /// Device in the network namespace [default: podHASH, with the first 11 hex digits of the SHA-256 of NAME]
    #[arg(long, value_name = "DEVICE", default_value = "", hide_default_value = true)]
    device: String,

    /// MAC address of the guest [default: that of the device]
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
