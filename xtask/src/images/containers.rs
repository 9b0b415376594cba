//! The container image of `deploy/`: husk-agent, and the programs that its init container installs on a node.

use crate::binaries::{self, Profile};
use crate::progress::Progress;
use crate::{checkout, container_image};
use anyhow::{Context, Result};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Name of the image in `deploy/`.
pub const AGENT: &str = "localhost/husk/agent:latest";
/// Programs of the image, all linked statically, in its root folder.
pub const PROGRAMS: [&str; 5] = [
    "husk-agent",
    "husk",
    "husk-monitor",
    "husk-vmm",
    "containerd-shim-husk-v2",
];

/// Arguments of `cargo xtask images containers`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Name and tag of the image
    #[arg(long, value_name = "IMAGE", default_value = AGENT)]
    tag: String,
    /// Use the existing release binaries
    #[arg(long)]
    no_build: bool,
}

/// Makes `target/images/husk-agent.tar`, and prints its path.
pub fn run(args: &Args) -> Result<()> {
    let progress = Progress::on_stderr();
    if !args.no_build {
        binaries::build(Profile::Release, &progress)?;
    }
    let archive = checkout::folder(checkout::target().join("images"))?.join("husk-agent.tar");
    let step = progress.step(format!("packing {}", args.tag));
    pack(&Profile::Release.folder(), &args.tag, &archive)?;
    step.done();
    println!("{}", archive.display());
    Ok(())
}

/// Packs the programs in the folder `programs` as the image `name` into the file `archive`.
pub fn pack(programs: &Path, name: &str, archive: &Path) -> Result<()> {
    let tree = tempfile::tempdir_in(archive.parent().context("no folder")?)?;
    std::fs::set_permissions(tree.path(), PermissionsExt::from_mode(0o755))?;
    for program in PROGRAMS {
        let from = programs.join(program);
        std::fs::copy(&from, tree.path().join(program))
            .with_context(|| format!("cannot copy {}: build it first", from.display()))?;
    }
    container_image::pack(tree.path(), name, &["/husk-agent"], archive, false)
}
