//! `husk images rm`.

use husk_images::{ImageName, ImageStore};

use crate::failure::{Failure, RUNTIME};

/// Remove images from the store
///
/// An image stays as long as another name refers to it. One that a running VM uses is not removed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk images rm quay.io/containerdisks/debian:13
  husk images rm $(husk images list -o name)")]
pub(super) struct Args {
    /// Names of images
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<ImageName>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let store = ImageStore::locate()?;
    let mut done = Ok(());
    for image in &args.images {
        if let Err(error) = store.remove(image) {
            Failure::from(error).report();
            done = Err(Failure::Ended(RUNTIME));
        }
    }
    done
}
