//! Container images as files: an OCI layout, or an archive of `skopeo copy`, `ctr image export` or `docker save`.
//!
//! Nothing in an image becomes a path of this host. What is read is bounded and checked against the digests that name
//! it; the one file that is wanted goes to the scratch directory under no name.

mod layer;
mod manifest;
mod store;
mod tarball;
mod unpack;

#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::error::Fault;
use super::path::Found;
use super::scratch::Scratch;

use layer::{Candidate, Search, What};
use manifest::Layer;
use store::Store;

/// The most bytes that the layers of an image unpack to: what compresses best could be unpacked for days.
const MOST_UNPACKED: u64 = 1 << 40;

/// What is wrong with an image, without its path.
type Why = String;

/// An image whose layers are known.
#[derive(Debug)]
pub(super) struct Image {
    path: PathBuf,
    store: Store,
    /// From the lowest on.
    layers: Vec<Layer>,
}

impl Image {
    /// The image that lies there; none if it is something else: an image file, or a directory of one.
    pub(super) fn find(given: &Found) -> Result<Option<Image>, Fault> {
        let Some(store) = Store::find(given)? else {
            return Ok(None);
        };
        let layers = manifest::layers(&store).map_err(|why| fault(&given.path, why))?;
        Ok(Some(Image {
            path: given.path.clone(),
            store,
            layers,
        }))
    }

    /// Unpacks the one file in the folder `disk`, or the file at `image_path`. `tell` hears of the bytes of layers that
    /// were read.
    pub(super) fn extract(
        &self,
        image_path: Option<&Path>,
        scratch: &Scratch,
        tell: &dyn Fn(u64, u64),
    ) -> Result<File, Fault> {
        let mut search = Search {
            image_path,
            scratch,
            found: BTreeMap::new(),
            left: MOST_UNPACKED,
        };
        let size = self.layers.iter().map(|layer| layer.size).sum();
        let mut done = 0;
        for (number, layer) in self.layers.iter().enumerate() {
            let told = |read| tell(done + read, size);
            search
                .layer(number, layer, &self.store, &told)
                .map_err(|why| fault(&self.path, format!("layer {}: {why}", layer.name)))?;
            done += layer.size;
        }
        self.choose(search.found, image_path)
    }

    fn choose(
        &self,
        mut found: BTreeMap<PathBuf, Candidate>,
        image_path: Option<&Path>,
    ) -> Result<File, Fault> {
        let folder = self.path.join("disk");
        match (found.pop_first(), found.is_empty(), image_path) {
            (None, _, None) => Err(Fault::NoDisk(folder)),
            (None, _, Some(path)) => Err(fault(&self.path, format!("it has no file {}", path.display()))),
            (Some(_), false, _) => Err(Fault::ManyDisks(folder)),
            (Some((path, candidate)), true, _) => match candidate.what {
                What::File(file) => Ok(file),
                What::Other(kind) => {
                    let why = format!("{} in it is {kind}, not a regular file", path.display());
                    Err(fault(&self.path, why))
                }
            },
        }
    }
}

fn fault(path: &Path, why: Why) -> Fault {
    Fault::ContainerImage {
        path: path.to_owned(),
        why,
    }
}
