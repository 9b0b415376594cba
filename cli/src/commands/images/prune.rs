//! `husk images prune`.

use husk_images::ImageStore;

use crate::failure::Failure;
use crate::output;

/// Remove unused images
///
/// Removes images whose names refer to newer ones by now, and interrupted pulls. Images with a name and those of
/// running VMs stay.
#[derive(Debug, clap::Args)]
pub(super) struct Args {}

pub(super) fn run(_: &Args) -> Result<(), Failure> {
    let pruned = ImageStore::locate()?.prune()?;
    output::print(&format!(
        "{} removed, {}Mi freed\n",
        pruned.removed,
        pruned.bytes.div_ceil(1 << 20)
    ))
}
