//! `husk resume`.

use husk_proto::shim::v1::ResumeRequest;

use crate::failure::Failure;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Resume a paused VM
///
/// The guest's clock continues from the time of the pause. Resuming a running VM does nothing.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    live_vm::block_on(async {
        live_vm::connect(&args.vm).await?.resume(ResumeRequest {}).await?;
        eprintln!("{}: resumed", args.vm);
        Ok(())
    })
}
