//! A container's bundle: the directory with its configuration.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;

/// Maximum size of a configuration with a VMI, in bytes.
const MOST: u64 = 16 << 20;
/// The annotation with a container's sandbox, of containerd's CRI plugin.
const SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";

/// An error of reading a configuration.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub(crate) struct BundleError {
    path: PathBuf,
    source: io::Error,
}

/// Returns the bundle of an action: `bundle`, or the working directory if it is empty.
pub(crate) fn directory(bundle: &str) -> Result<PathBuf, String> {
    match bundle {
        "" => std::env::current_dir().map_err(|error| format!("the working directory: {error}")),
        bundle => Ok(bundle.into()),
    }
}

/// Reads the container's configuration.
pub(crate) fn spec(bundle: &Path) -> Result<Spec, BundleError> {
    let path = bundle.join("config.json");
    let read = File::open(&path)
        .and_then(|file| serde_json::from_reader(BufReader::new(file.take(MOST))).map_err(io::Error::other));
    read.map_err(|source| BundleError { path, source })
}

/// Returns the pod's sandbox, which groups the pod's containers; none outside of pods.
pub(crate) fn group(bundle: &Path) -> Result<Option<String>, BundleError> {
    let spec = spec(bundle)?;
    Ok(crate::spec::annotation(&spec, SANDBOX_ID).map(str::to_owned))
}
