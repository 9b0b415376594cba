//! `husk images pull`.

use std::path::PathBuf;

use husk_images::{ImageName, ImageStore, PullPolicy, PullRequest};

use crate::failure::Failure;
use crate::{import_program, output};

/// Pull images into the store
///
/// Asks the registry for the newest image of each name, and fetches it unless the store has it. A pull that was cut off
/// goes on where it ended. Prints the images' digests.
///
/// Credentials are those of `podman login` and `docker login`, their helpers included. Certificates are read from
/// /etc/containers/certs.d and /etc/docker/certs.d; registries on localhost without one there are asked by plain HTTP.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk images pull quay.io/containerdisks/debian:13
  husk images pull --path boot/vmlinuz --path boot/initrd quay.io/example/kernel:6.12")]
pub(super) struct Args {
    /// Names of images, such as quay.io/containerdisks/debian:13
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<ImageName>,

    /// File to unpack, instead of the disk in the folder /disk; may be repeated
    #[arg(long = "path", value_name = "PATH")]
    paths: Vec<PathBuf>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let store = ImageStore::locate()?;
    let files = match args.paths.is_empty() {
        true => vec![None],
        false => args
            .paths
            .iter()
            .map(|path| image_path(path).map(Some))
            .collect::<Result<_, _>>()?,
    };
    for image in &args.images {
        let image = import_program::pull(PullRequest {
            store: store.path().to_owned(),
            name: image.to_string(),
            policy: PullPolicy::Always,
            files: files.clone(),
            pull_secret: None,
        })?;
        output::print(&format!("{}@{}\n", image.name, image.digest))?;
    }
    Ok(())
}

/// A path in an image, without a leading `/`.
fn image_path(path: &std::path::Path) -> Result<PathBuf, Failure> {
    let plain: PathBuf = path.strip_prefix("/").unwrap_or(path).into();
    let is_plain = plain
        .components()
        .all(|part| matches!(part, std::path::Component::Normal(_)));
    match is_plain && plain.components().next().is_some() {
        true => Ok(plain),
        false => Err(Failure::Usage(format!(
            "--path {}: it must be the path of a file in the image, without `..`",
            path.display()
        ))),
    }
}
