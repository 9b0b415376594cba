//! `husk link`.

use husk_proto::shim::v1::SetLinkRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Set the link of a VM's network interface up or down
///
/// The guest sees the carrier change, as if a cable were unplugged or plugged in. The interface itself stays.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk link demo default down")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Name of the interface in the manifest, or the one given to `husk addinterface`
    name: String,

    /// New state of the link
    #[arg(value_enum)]
    state: LinkState,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum LinkState {
    /// Carrier on
    Up,
    /// Carrier off
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
