//! A container's bundle: the directory with its configuration.

use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;

/// Maximum size of a configuration with a VMI, in bytes.
const MOST: u64 = 16 << 20;
/// The annotation with a container's sandbox, of containerd's CRI plugin.
const SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";

/// File with the path of the shim's program, from which containerd runs `delete`.
const PROGRAM: &str = "shim-binary-path";

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

/// Copies the path of the shim's program from the bundle of the sandbox, unless containerd wrote it.
///
/// containerd 2.0 and newer writes it only for the container that starts a shim. When it is restarted, it looks in
/// `PATH` for the shims of the other containers, and deletes a container whose shim it does not find there.
pub(crate) fn record_program(bundle: &Path, sandbox: &Path) -> io::Result<()> {
    let path = bundle.join(PROGRAM);
    if path.exists() {
        return Ok(());
    }
    let program = fs::read(sandbox.join(PROGRAM))?;
    // containerd deletes a container with an incomplete path.
    let unfinished = bundle.join(".shim-binary-path");
    fs::write(&unfinished, program)?;
    fs::rename(unfinished, path)
}

/// Returns the pod's sandbox, which groups the pod's containers; none outside of pods.
pub(crate) fn group(bundle: &Path) -> Result<Option<String>, BundleError> {
    let spec = spec(bundle)?;
    Ok(crate::spec::annotation(&spec, SANDBOX_ID).map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_recorded_once() {
        let (dir, sandbox) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let recorded = dir.path().join(PROGRAM);
        record_program(dir.path(), sandbox.path()).unwrap_err();
        assert!(!recorded.exists());
        for program in ["/opt/husk/1/shim", "/opt/husk/2/shim"] {
            fs::write(sandbox.path().join(PROGRAM), program).unwrap();
            record_program(dir.path(), sandbox.path()).unwrap();
        }
        assert_eq!(fs::read_to_string(&recorded).unwrap(), "/opt/husk/1/shim");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
