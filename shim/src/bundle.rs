//! A container's bundle: the directory with its configuration.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
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

/// Writes the path of the shim's program to the bundle, unless containerd did.
///
/// containerd 2.0 and newer writes it only for the container that starts a shim. When it is restarted, it looks in `PATH`
/// for the shims of the other containers, and deletes a container whose shim it does not find there.
pub(crate) fn record_program(bundle: &Path, program: &Path) -> io::Result<()> {
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    match options.open(bundle.join(PROGRAM)) {
        Ok(mut file) => file.write_all(program.as_os_str().as_bytes()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
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
        let dir = tempfile::tempdir().unwrap();
        for program in ["/opt/husk/1/shim", "/opt/husk/2/shim"] {
            record_program(dir.path(), Path::new(program)).unwrap();
        }
        let recorded = std::fs::read_to_string(dir.path().join(PROGRAM)).unwrap();
        assert_eq!(recorded, "/opt/husk/1/shim");
        assert!(record_program(&dir.path().join("absent"), Path::new("/shim")).is_err());
    }
}
