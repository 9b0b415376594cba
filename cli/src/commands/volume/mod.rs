//! `husk volume`.

mod create;
mod list;

use clap::Subcommand;
use husk_claims::{ClaimStore, NewClaim};
use husk_images::data_directory;
use husk_vmi::Quantity;

use crate::failure::{Failure, RUNTIME};
use crate::output;
use crate::vm_ref::VmRef;

/// Make, list, grow, copy and remove the volumes of this machine
///
/// A volume is a sparse raw file that is kept until it is removed: what a PersistentVolumeClaim is in a cluster. Each
/// user has volumes of their own. A volume is named NAME or NAMESPACE/NAME.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk volume create data --size 10Gi
  husk run vm.yaml --volume data=$(husk volume path data)
  husk volume resize data 20Gi
  husk volume clone data test/data")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: VolumeCommand,
}

#[derive(Debug, Subcommand)]
enum VolumeCommand {
    List(list::Args),
    Create(create::Args),
    /// Grow a volume, also while a VM uses it
    ///
    /// The guest sees the new size within a few seconds. Volumes do not shrink.
    Resize {
        #[arg(value_name = "VOLUME")]
        volume: VmRef,
        /// New size, such as 20Gi; rounded up to whole MiB
        #[arg(value_parser = size)]
        size: u64,
    },
    /// Copy a volume that no running VM writes
    ///
    /// Shares the data where the file system has reflinks, such as XFS and btrfs; elsewhere only data is copied, and
    /// holes stay holes.
    Clone {
        #[arg(value_name = "VOLUME")]
        source: VmRef,
        /// Name of the copy
        #[arg(value_name = "NEW")]
        new: VmRef,
    },
    /// Print the path of a volume's image
    Path {
        #[arg(value_name = "VOLUME")]
        volume: VmRef,
    },
    /// Remove volumes and their data
    Rm {
        #[arg(value_name = "VOLUME", required = true)]
        volumes: Vec<VmRef>,
    },
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let store = ClaimStore::at(data_directory()?.join("volumes"));
    match &args.command {
        VolumeCommand::List(args) => list::run(args, &store),
        VolumeCommand::Create(args) => create::run(args, &store),
        VolumeCommand::Resize { volume, size } => {
            store.resize(&volume.namespace, &volume.name, *size)?;
            Ok(())
        }
        VolumeCommand::Clone { source, new } => {
            let from = store.get(&source.namespace, &source.name)?;
            let new = NewClaim {
                access_modes: from.object.spec.access_modes,
                volume_mode: from.object.spec.volume_mode,
                ..NewClaim::new(&new.namespace, &new.name, from.size)
            };
            let bar = indicatif::ProgressBar::new(0);
            let done = store.copy((&source.namespace, &source.name), &new, &|done, size| {
                bar.set_length(size);
                bar.set_position(done);
            });
            bar.finish_and_clear();
            Ok(done?)
        }
        VolumeCommand::Path { volume } => {
            store.get(&volume.namespace, &volume.name)?;
            let path = store.image(&volume.namespace, &volume.name);
            output::print(&format!("{}\n", path.display()))
        }
        VolumeCommand::Rm { volumes } => {
            let mut done = Ok(());
            for volume in volumes {
                if let Err(error) = store.remove(&volume.namespace, &volume.name) {
                    Failure::from(error).report();
                    done = Err(Failure::Ended(RUNTIME));
                }
            }
            done
        }
    }
}

/// Parses a size, a Kubernetes quantity.
fn size(text: &str) -> Result<u64, String> {
    let quantity: Quantity = text
        .parse()
        .map_err(|_| "expected a size such as 10Gi".to_owned())?;
    let bytes = quantity
        .bytes()
        .filter(|bytes| *bytes <= i64::MAX as u64 - (1 << 20));
    bytes.ok_or_else(|| "expected a size such as 10Gi".to_owned())
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_are_quantities() {
        assert_eq!(size("10Gi"), Ok(10 << 30));
        assert_eq!(size("1500M"), Ok(1_500_000_000));
        for bad in ["", "-1", "many", "9223372036854775807"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
