//! The containerd that install was told to use, so that uninstall removes the handler from the same one.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::super::files;
use super::options::Options;
use crate::failure::Failure;

/// containerd's own default.
const SOCKET: &str = "/run/containerd/containerd.sock";

/// The socket of containerd, and its configuration file if the command line names one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Installation {
    pub(super) socket: PathBuf,
    pub(super) config: Option<PathBuf>,
}

impl Installation {
    /// The installation that the command line describes. Options that are not given are taken from `earlier`.
    pub(super) fn chosen(
        options: &Options,
        config: Option<&Path>,
        earlier: Option<Installation>,
    ) -> Result<Installation, Failure> {
        let absolute = |path: &Path| std::path::absolute(path).map_err(files::at(path));
        let socket = options.socket.as_deref().map(absolute).transpose()?;
        let config = config.map(absolute).transpose()?;
        let (former_socket, former_config) =
            earlier.map_or((None, None), |earlier| (Some(earlier.socket), earlier.config));
        // The configuration file belongs to the containerd of that socket.
        let is_other = socket.is_some() && socket != former_socket;
        let former_config = former_config.filter(|_| !is_other);
        Ok(Installation {
            socket: socket.or(former_socket).unwrap_or_else(|| SOCKET.into()),
            config: config.or(former_config),
        })
    }

    /// Reads the record of the installation; none if there is no such file.
    pub(super) fn read(path: &Path) -> Result<Option<Installation>, Failure> {
        files::json(path, "remove this file, and name containerd's socket by --socket")
    }

    /// Records it.
    pub(super) fn write(&self, path: &Path) -> Result<(), Failure> {
        let text = serde_json::to_string(self)?;
        let old = files::text(path)?;
        files::replace(path, old.as_deref(), Some(&text)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_comes_before_the_record() {
        let options = |socket: Option<&str>| Options {
            restart: true,
            host_root: None,
            versions: "/opt/husk".into(),
            socket: socket.map(PathBuf::from),
            wait: 1,
        };
        let chosen = |socket, config: Option<&str>, earlier: Option<&Installation>| {
            let config = config.map(Path::new);
            match Installation::chosen(&options(socket), config, earlier.cloned()) {
                Ok(Installation { socket, config }) => (socket, config),
                Err(failure) => panic!("{failure:?}"),
            }
        };
        let k3s = Installation {
            socket: "/run/k3s/sock".into(),
            config: Some("/k3s.toml".into()),
        };
        assert_eq!(chosen(None, None, None), (SOCKET.into(), None));
        let kept = (k3s.socket.clone(), k3s.config.clone());
        assert_eq!(chosen(None, None, Some(&k3s)), kept);
        assert_eq!(chosen(Some("/run/k3s/sock"), None, Some(&k3s)), kept);
        assert_eq!(chosen(Some("/x"), None, Some(&k3s)), ("/x".into(), None));
        let other = Some(PathBuf::from("/y"));
        assert_eq!(chosen(None, Some("/y"), Some(&k3s)), (k3s.socket.clone(), other));
    }

    #[test]
    fn a_damaged_record_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("installation");
        assert!(matches!(Installation::read(&path), Ok(None)));
        std::fs::write(&path, "{").unwrap();
        let read = Installation::read(&path);
        assert!(matches!(&read, Err(Failure::Runtime(why)) if why.contains("remove this file")));
    }
}
