//! A container's bundle: the directory in which containerd leaves its configuration.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;

/// A configuration with a VMI, and whatever else a container has; more is no configuration.
const MOST: u64 = 16 << 20;
/// The sandbox a container is of, as containerd's CRI plugin says.
const SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";

/// A configuration that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub(crate) struct BundleError {
    path: PathBuf,
    source: io::Error,
}

/// The bundle that an action is about.
pub(crate) fn directory(bundle: &str) -> Result<PathBuf, String> {
    match bundle {
        "" => std::env::current_dir().map_err(|error| format!("the working directory: {error}")),
        bundle => Ok(bundle.into()),
    }
}

/// The container's configuration.
pub(crate) fn spec(bundle: &Path) -> Result<Spec, BundleError> {
    let path = bundle.join("config.json");
    let read = File::open(&path)
        .and_then(|file| serde_json::from_reader(BufReader::new(file.take(MOST))).map_err(io::Error::other));
    read.map_err(|source| BundleError { path, source })
}

/// The pod's sandbox, by which the pod's containers find each other; none outside of pods.
pub(crate) fn group(bundle: &Path) -> Result<Option<String>, BundleError> {
    let spec = spec(bundle)?;
    Ok(crate::spec::annotation(&spec, SANDBOX_ID).map(str::to_owned))
}
