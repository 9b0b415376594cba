//! The journal: what a change of containerd's configuration replaces, until containerd runs with it. A command that is
//! killed leaves the journal to the next one.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::super::files::{self, Access, FileChange};
use super::store::remove_empty;
use crate::failure::Failure;

/// A file that a change writes or removes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ConfigFile {
    pub(super) path: PathBuf,
    /// Text before the change; none if there was no file.
    pub(super) before: Option<String>,
    /// Text after the change; none if there is no file then.
    pub(super) after: Option<String>,
    /// The file's directory is created and removed with it.
    pub(super) with_directory: bool,
    /// Owner and mode before the change.
    pub(super) access: Option<Access>,
}

impl ConfigFile {
    /// Makes the change.
    pub(super) fn apply(&self) -> Result<FileChange, Failure> {
        self.write(self.before.as_deref(), self.after.as_deref())
    }

    /// Undoes the change, unless somebody else has changed the file since.
    pub(super) fn undo(&self) -> Result<FileChange, Failure> {
        if files::text(&self.path)? != self.after {
            return Ok(FileChange::Unchanged);
        }
        self.write(self.after.as_deref(), self.before.as_deref())
    }

    fn write(&self, old: Option<&str>, new: Option<&str>) -> Result<FileChange, Failure> {
        let done = files::replace_as(&self.path, old, new, self.access)?;
        if new.is_none()
            && self.with_directory
            && let Some(directory) = self.path.parent()
        {
            remove_empty(directory)?;
        }
        Ok(done)
    }
}

/// A change of containerd's configuration, and how to restart it when it does not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Journal {
    pub(super) files: Vec<ConfigFile>,
    /// containerd's program.
    pub(super) program: PathBuf,
    /// Its configuration.
    pub(super) config: PathBuf,
    /// Its unit of systemd's.
    pub(super) unit: String,
}

impl Journal {
    /// The journal that an interrupted command has left.
    pub(super) fn read(path: &Path) -> Result<Option<Journal>, Failure> {
        files::json(
            path,
            "check containerd's configuration, restart containerd, and remove this file",
        )
    }

    /// Writes the journal. Texts of configurations may have passwords.
    pub(super) fn write(&self, path: &Path) -> Result<(), Failure> {
        let text = serde_json::to_string(self)?;
        files::write_private(path, &text)
    }

    /// Undoes the change.
    pub(super) fn undo(&self) -> Result<(), Failure> {
        self.files.iter().rev().try_for_each(|file| file.undo().map(drop))
    }
}

/// Removes the journal: the change is complete, or undone.
pub(super) fn forget(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(files::at(path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_undone_unless_the_file_was_edited() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("config.toml"), "a").unwrap();
        let file = |path, before: Option<&str>, after: Option<&str>| ConfigFile {
            path,
            before: before.map(str::to_owned),
            after: after.map(str::to_owned),
            with_directory: true,
            access: None,
        };
        let journal = Journal {
            files: vec![
                file(at("config.toml"), Some("a"), Some("b")),
                file(at("conf.d/husk.toml"), None, Some("c")),
            ],
            program: "/usr/bin/containerd".into(),
            config: at("config.toml"),
            unit: "containerd.service".into(),
        };
        assert!(journal.write(&at("journal")).is_ok());
        assert!(matches!(Journal::read(&at("journal")), Ok(Some(read)) if read == journal));
        let apply = || journal.files.iter().all(|file| file.apply().is_ok());
        assert!(apply() && journal.undo().is_ok());
        assert_eq!(fs::read_to_string(at("config.toml")).unwrap(), "a");
        assert!(!at("conf.d").exists());
        assert!(apply());
        fs::write(at("config.toml"), "edited").unwrap();
        assert!(journal.undo().is_ok());
        assert_eq!(fs::read_to_string(at("config.toml")).unwrap(), "edited");
        assert!(!at("conf.d").exists());
        assert!(forget(&at("journal")).is_ok() && forget(&at("journal")).is_ok());
        assert!(matches!(Journal::read(&at("journal")), Ok(None)));
        fs::write(at("journal"), "{").unwrap();
        assert!(
            matches!(Journal::read(&at("journal")), Err(Failure::Runtime(text)) if text.contains("remove this"))
        );
    }

    #[test]
    fn secrets_are_readable_by_their_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mode = |name: &str| fs::metadata(at(name)).unwrap().permissions().mode() & 0o777;
        fs::write(at("config.toml"), "secret").unwrap();
        fs::set_permissions(at("config.toml"), PermissionsExt::from_mode(0o640)).unwrap();
        for after in [Some("secret, and more"), None] {
            let journal = Journal {
                files: vec![ConfigFile {
                    path: at("config.toml"),
                    before: Some("secret".to_owned()),
                    after: after.map(str::to_owned),
                    with_directory: false,
                    access: Access::of(&at("config.toml")),
                }],
                program: "/usr/bin/containerd".into(),
                config: at("config.toml"),
                unit: "containerd.service".into(),
            };
            assert!(journal.write(&at("journal")).is_ok());
            assert_eq!(mode("journal"), 0o600);
            assert!(journal.files.iter().all(|file| file.apply().is_ok()));
            assert!(after.is_none() || mode("config.toml") == 0o640);
            assert!(journal.undo().is_ok());
            assert_eq!(mode("config.toml"), 0o640);
        }
    }
}
