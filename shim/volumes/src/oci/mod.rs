//! Container images as files: an OCI image layout, or an archive of `skopeo copy`, `ctr image export` or `docker save`.
//!
//! No name in an image becomes a path on the host. Reads are bounded and checked against digests. The disk's file is
//! extracted to the scratch directory without a name.

mod blob_store;
mod decompress;
mod layer_search;
mod manifest;
mod tarball;

#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::error::VolumeFault;
use super::path_handle::PathHandle;
use super::scratch::ScratchDir;

use blob_store::BlobStore;
use layer_search::{Candidate, CandidateContent, LayerSearch};
use manifest::Layer;

/// Limit for the decompressed size of all layers, in bytes: highly compressed data could keep the CPU busy for days.
const MAX_UNPACKED: u64 = 1 << 40;

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
        let mut search = LayerSearch {
            image_path,
            scratch,
            found: BTreeMap::new(),
            left: MAX_UNPACKED,
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
        self.choose(search.found, image_path)
    }

    fn choose(
        &self,
        mut found: BTreeMap<PathBuf, Candidate>,
        image_path: Option<&Path>,
    ) -> Result<File, VolumeFault> {
        let folder = self.path.join("disk");
        match (found.pop_first(), found.is_empty(), image_path) {
            (None, _, None) => Err(VolumeFault::NoDisk(folder)),
            (None, _, Some(path)) => Err(VolumeFault::container_image(
                &self.path,
                format!("it has no file {}", path.display()),
            )),
            (Some(_), false, _) => Err(VolumeFault::ManyDisks(folder)),
            (Some((path, candidate)), true, _) => match candidate.what {
                CandidateContent::File(file) => Ok(file),
                CandidateContent::Other(kind) => {
                    let reason = format!("{} in it is {kind}, not a regular file", path.display());
                    Err(VolumeFault::container_image(&self.path, reason))
                }
            },
        }
    }
}
