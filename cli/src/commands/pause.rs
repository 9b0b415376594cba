//! `husk pause`.

use husk_proto::shim::v1::PauseRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Pause a VM
///
/// Returns when all vCPUs have stopped. The guest keeps its memory, and its clock stops too. `husk resume` continues.
/// Pausing a paused VM does nothing.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    live_vm::block_on(async {
        live_vm::connect(&args.vm).await?.pause(PauseRequest {}).await?;
        eprintln!("{}: paused", args.vm);
        Ok(())
    })
}
