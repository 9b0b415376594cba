//! Container images as files: an OCI image layout, or an archive of `skopeo copy`, `ctr image export` or `docker save`.
//!
//! Reads are bounded and checked against digests. The disk's file is extracted to the scratch directory without a name,
//! or wanted files below a new directory. Only directories and regular files are created there, so no name in an image
//! leads out of it.

mod blob_store;
mod decompress;
mod layer_search;
mod manifest;
mod tarball;
mod unpack;

#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Component, Path, PathBuf};

use super::error::VolumeFault;
use super::path_handle::PathHandle;
use super::scratch::ScratchDir;

use blob_store::BlobStore;
pub use decompress::decompress;
use layer_search::{Candidate, CandidateContent, Extracted, LayerSearch, Place};
use manifest::Layer;
pub use unpack::unpack_image;

/// Limit for the decompressed size of all layers, in bytes: highly compressed data could keep the CPU busy for days.
const MAX_UNPACKED: u64 = 1 << 40;

/// A file that is wanted from a container image.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageFile {
    /// The only file in the folder `disk`.
    Disk,
    /// The file at a path, without a leading `/`.
    At(PathBuf),
}

impl ImageFile {
    fn matches(&self, path: &Path) -> bool {
        match self {
            ImageFile::At(wanted) => path == wanted,
            ImageFile::Disk => {
                let mut parts = path.components();
                parts.next() == Some(Component::Normal(OsStr::new("disk")))
                    && parts.next().is_some()
                    && parts.next().is_none()
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct ContainerImage {
    path: PathBuf,
    store: BlobStore,
    /// The lowest first.
    layers: Vec<Layer>,
}

impl ContainerImage {
    /// Opens the image; `None` if this is an image file or a directory with one.
    pub(super) fn find(given: &PathHandle) -> Result<Option<ContainerImage>, VolumeFault> {
        let Some(store) = BlobStore::find(given)? else {
            return Ok(None);
        };
        let layers =
            manifest::layers(&store).map_err(|reason| VolumeFault::container_image(&given.path, reason))?;
        Ok(Some(ContainerImage {
            path: given.path.clone(),
            store,
            layers,
        }))
    }

    /// Extracts the one file in the folder `disk`, or the file at `image_path`. Calls `progress` with compressed bytes
    /// read and total.
    pub(super) fn extract(
        &self,
        image_path: Option<&Path>,
        scratch: &ScratchDir,
        progress: &dyn Fn(u64, u64),
    ) -> Result<File, VolumeFault> {
        let wanted = image_path.map_or(ImageFile::Disk, |path| ImageFile::At(path.to_owned()));
        let found = self.search(std::slice::from_ref(&wanted), scratch, progress)?;
        self.choose(&found, &wanted)?;
        let mut found = found.into_values().filter_map(CandidateContent::of);
        let extracted = found.next().map(|extracted| extracted.file);
        extracted.ok_or_else(|| VolumeFault::NoDisk(self.path.join("disk")))
    }

    /// The files at the wanted paths.
    fn search(
        &self,
        wanted: &[ImageFile],
        place: &dyn Place,
        progress: &dyn Fn(u64, u64),
    ) -> Result<BTreeMap<PathBuf, Candidate>, VolumeFault> {
        let mut search = LayerSearch {
            wanted,
            place,
            found: BTreeMap::new(),
            left: MAX_UNPACKED,
            extracted: 0,
        };
        let size = self.layers.iter().map(|layer| layer.size).sum();
        let mut done = 0;
        for (number, layer) in self.layers.iter().enumerate() {
            let layer_progress = |read| progress(done + read, size);
            search
                .layer(number, layer, &self.store, &layer_progress)
                .map_err(|reason| {
                    VolumeFault::container_image(&self.path, format!("layer {}: {reason}", layer.name))
                })?;
            done += layer.size;
        }
        Ok(search.found)
    }

    /// Path and content of a wanted file, which must be there once and regular.
    fn choose<'a>(
        &self,
        found: &'a BTreeMap<PathBuf, Candidate>,
        wanted: &ImageFile,
    ) -> Result<(&'a Path, &'a Extracted), VolumeFault> {
        let folder = self.path.join("disk");
        let mut matching = found.iter().filter(|(path, _)| wanted.matches(path));
        match (matching.next(), matching.next(), wanted) {
            (None, _, ImageFile::Disk) => Err(VolumeFault::NoDisk(folder)),
            (None, _, ImageFile::At(path)) => Err(VolumeFault::container_image(
                &self.path,
                format!("it has no file {}", path.display()),
            )),
            (Some(_), Some(_), _) => Err(VolumeFault::ManyDisks(folder)),
            (Some((path, candidate)), None, _) => match &candidate.what {
                CandidateContent::File(extracted) => Ok((path, extracted)),
                CandidateContent::Other(kind) => {
                    let reason = format!("{} in it is {kind}, not a regular file", path.display());
                    Err(VolumeFault::container_image(&self.path, reason))
                }
            },
        }
    }
}

impl CandidateContent {
    fn of(candidate: Candidate) -> Option<Extracted> {
        match candidate.what {
            CandidateContent::File(extracted) => Some(extracted),
            CandidateContent::Other(_) => None,
        }
    }
}

/// Files without names.
impl Place for ScratchDir {
    fn create(&self) -> Result<Extracted, String> {
        let file = self.temporary().map_err(|fault| fault.to_string())?;
        Ok(Extracted { file, name: None })
    }

    fn path(&self) -> &Path {
        ScratchDir::path(self)
    }
}
