//! `husk volume create`.

use husk_claims::{ClaimStore, NewClaim};
use husk_vmi::objects::{AccessMode, VolumeMode};

use crate::failure::Failure;
use crate::vm_ref::VmRef;

/// Make an empty volume
///
/// It takes space only as the guest writes.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[arg(value_name = "VOLUME")]
    volume: VmRef,

    /// Size, such as 10Gi; rounded up to whole MiB
    #[arg(long, value_parser = super::size)]
    size: u64,

    /// Access mode, by its full name or RWO, ROX, RWX, RWOP; may be repeated
    #[arg(long = "access-mode", value_name = "MODE", value_parser = access_mode, default_value = "RWO")]
    access_modes: Vec<AccessMode>,

    /// Record the volume mode Block instead of Filesystem; the data is the same
    #[arg(long)]
    block: bool,
}

pub(super) fn run(args: &Args, store: &ClaimStore) -> Result<(), Failure> {
    store.create(&NewClaim {
        access_modes: args.access_modes.clone(),
        volume_mode: match args.block {
            true => VolumeMode::Block,
            false => VolumeMode::Filesystem,
        },
        ..NewClaim::new(&args.volume.namespace, &args.volume.name, args.size)
    })?;
    Ok(())
}

fn access_mode(text: &str) -> Result<AccessMode, String> {
    match text {
        "RWO" | "ReadWriteOnce" => Ok(AccessMode::ReadWriteOnce),
        "ROX" | "ReadOnlyMany" => Ok(AccessMode::ReadOnlyMany),
        "RWX" | "ReadWriteMany" => Ok(AccessMode::ReadWriteMany),
        "RWOP" | "ReadWriteOncePod" => Ok(AccessMode::ReadWriteOncePod),
        _ => Err("expected RWO, ROX, RWX, RWOP or a full name such as ReadWriteOnce".into()),
    }
}
