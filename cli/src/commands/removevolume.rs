//! `husk removevolume`.

use husk_proto::shim::v1::RemoveVolumeRequest;

use crate::failure::{Failure, one_line};
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Remove a disk that was added by `husk addvolume`
///
/// Unmount the disk in the guest first: the guest is notified and has five seconds to write cached data. Returns when the
/// image is closed. For a paused VM the five seconds start when it is resumed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Name of the volume
    #[arg(long, value_name = "NAME")]
    volume_name: String,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let request = RemoveVolumeRequest {
        name: args.volume_name.clone(),
    };
    live_vm::block_on(async {
        let removed = live_vm::connect(&args.vm).await?.remove_volume(request).await?;
        eprintln!("{}: removed volume {}", args.vm, args.volume_name);
        match removed.get_ref().flush_error.as_str() {
            "" => Ok(()),
            error => Err(Failure::Runtime(format!(
                "volume {}: the last writes may be lost: {}",
                args.volume_name,
                one_line(error)
            ))),
        }
    })
}
