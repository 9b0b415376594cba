//! `husk link`.

use husk_proto::shim::v1::SetLinkRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Pull the cable of a VM's network interface, or plug it in again
///
/// The guest sees its link go, and come back; the interface stays.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk link demo default down")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// What the interface is called in the manifest, or was added as
    name: String,

    /// What is to become of the cable
    #[arg(value_enum)]
    state: LinkState,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum LinkState {
    /// Plugged in
    Up,
    /// Pulled
    Down,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let up = matches!(args.state, LinkState::Up);
    let request = SetLinkRequest {
        name: args.name.clone(),
        up,
    };
    live_vm::block_on(async {
        live_vm::connect(&args.vm).await?.set_link(request).await?;
        let state = if up { "up" } else { "down" };
        eprintln!("{}: interface {} is {state}", args.vm, args.name);
        Ok(())
    })
}
