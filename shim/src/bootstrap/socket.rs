//! The socket of a pod's shim.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Directory of the sockets of containerd's shims.
const DIRECTORY: &str = "/run/containerd/s";

/// The address of a shim's socket. It depends only on the pod, so each container of the pod finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address(PathBuf);

impl Address {
    /// The address for a group of containers in a namespace of containerd.
    pub(crate) fn of(directory: Option<&str>, containerd: &str, namespace: &str, group: &str) -> Address {
        let what = Path::new(containerd).join(namespace).join(group);
        let digest = Sha256::digest(what.display().to_string());
        let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Address(Path::new(directory.unwrap_or(DIRECTORY)).join(name))
    }

    /// The address of a path.
    pub(crate) fn at(path: &str) -> Address {
        Address(path.into())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Creates the socket. Returns `None` if a shim listens on it already.
    pub(crate) fn listen(&self) -> Result<Option<UnixListener>, String> {
        let failed = |error: io::Error| format!("{}: {error}", self.0.display());
        if let Some(directory) = self.0.parent() {
            let made = fs::DirBuilder::new()
                .recursive(true)
                .mode(0o711)
                .create(directory);
            made.map_err(failed)?;
        }
        for _ in 0..2 {
            match UnixListener::bind(&self.0) {
                Ok(listener) => {
                    fs::set_permissions(&self.0, fs::Permissions::from_mode(0o600)).map_err(failed)?;
                    return Ok(Some(listener));
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    if self.is_served() {
                        return Ok(None);
                    }
                    // The shim of this socket was killed.
                    self.remove();
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Err(failed(io::ErrorKind::AddrInUse.into()))
    }

    /// True if a shim listens on the socket.
    pub(crate) fn is_served(&self) -> bool {
        UnixStream::connect(&self.0).is_ok()
    }

    pub(crate) fn remove(&self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.0.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_where_containerd_expects_it() {
        let address = Address::of(None, "/run/containerd/containerd.sock", "default", "123");
        assert_eq!(
            address.to_string(),
            "unix:///run/containerd/s/0ddfbd72d02b3551e75f3a0ed90b9965b533401be618f43a568bc522764e0ad0"
        );
    }

    #[test]
    fn socket_of_a_dead_shim_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let address = Address::of(dir.path().to_str(), "/run/c.sock", "default", "a");
        let first = address.listen().unwrap().unwrap();
        assert!(address.listen().unwrap().is_none());
        drop(first);
        assert!(!address.is_served());
        let second = address.listen().unwrap();
        assert!(second.is_some() && address.is_served());
        address.remove();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
