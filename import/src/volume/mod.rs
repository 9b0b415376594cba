//! Fills a volume: fetches an image from a web server or a registry, and converts it to `disk.img`.

mod directory;
mod error;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;

use husk_images::{Event, ImageStore, PullPolicy, PullRequest, RegistrySource, VolumeRequest, VolumeSource};

use crate::convert;
use crate::http;
use crate::pull::pull;
use crate::registry::Access;

pub use directory::{Entry, ImportDirectory};
pub use error::VolumeError;

/// Fills the volume, and returns its size in bytes.
///
/// # Errors
/// See [`VolumeError`]. What was fetched stays in the directory, unless it is of no use.
pub async fn fill(request: &VolumeRequest, emit: &dyn Fn(&Event)) -> Result<u64, VolumeError> {
    let directory = ImportDirectory::open(&request.directory)?;
    let image = match &request.source {
        VolumeSource::Http(source) => http::fetch(source, &directory, emit).await?,
        VolumeSource::Registry(source) => containerdisk(source, &directory, emit).await?,
    };
    let converted = convert::convert(image, &directory, request.size, emit);
    match converted {
        Ok(size) => {
            directory.finish()?;
            Ok(size)
        }
        Err(error) => {
            directory.remove(&Entry::OF_CONVERSION)?;
            if error.is_of_the_image() {
                directory.remove(&Entry::OF_SOURCE)?;
            }
            Err(error)
        }
    }
}

/// Pulls a containerDisk into a store of this import's own, and opens its disk.
async fn containerdisk(
    source: &RegistrySource,
    directory: &ImportDirectory,
    emit: &dyn Fn(&Event),
) -> Result<File, VolumeError> {
    let store = ImageStore::at(directory.path(Entry::Store));
    let request = PullRequest {
        store: store.path().to_owned(),
        name: source.image.clone(),
        policy: PullPolicy::Always,
        files: vec![None],
        pull_secret: source.pull_secret.clone(),
    };
    let access = Access {
        pull_secret: source.pull_secret.as_deref(),
        login: source.login.as_ref(),
        certificates: &source.certificates,
    };
    let image = pull(&request, access, emit).await?;
    let folder = store.rootfs(&image.digest).join("disk");
    let disk = fs::read_dir(&folder)
        .and_then(|mut files| files.next().transpose())
        .map_err(VolumeError::io(&folder))?;
    let path = disk.map_or(folder, |disk| disk.path());
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)
        .map_err(VolumeError::io(&path))
}
