//! Atomic replacement of files: a reader sees the old or the new content.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{self as unix, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::failure::{self, Failure};

/// Outcome for a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileChange {
    Created,
    Changed,
    Removed,
    Unchanged,
}

/// Mode and owner of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Access {
    mode: u32,
    uid: u32,
    gid: u32,
}

impl Access {
    /// The mode and owner of the file; none if it does not exist.
    pub(super) fn of(path: &Path) -> Option<Access> {
        let meta = fs::metadata(path).ok()?;
        Some(Access {
            mode: meta.mode() & 0o7777,
            uid: meta.uid(),
            gid: meta.gid(),
        })
    }
}

/// Resolves the path if it is a symbolic link.
pub(super) fn followed(path: &Path) -> Result<PathBuf, Failure> {
    match fs::read_link(path) {
        Err(_) => Ok(path.to_owned()),
        Ok(to) => fs::canonicalize(path).map_err(|_| {
            Failure::Runtime(format!(
                "{}: the target of this symbolic link, {}, does not exist: create it or remove the link",
                path.display(),
                to.display()
            ))
        }),
    }
}

/// Text of a file; none if the file does not exist.
pub(super) fn text(path: &Path) -> Result<Option<String>, Failure> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => Ok(Some(read.map_err(at(path))?)),
    }
}

/// Content of a JSON file; none if the file does not exist. The error of a file that is not as expected ends with
/// `remedy`.
pub(super) fn json<T: DeserializeOwned>(path: &Path, remedy: &str) -> Result<Option<T>, Failure> {
    let Some(text) = text(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text).map(Some).map_err(|error| {
        let why = failure::chain(&error);
        Failure::Runtime(format!("{}: {why}: {remedy}", path.display()))
    })
}

/// Copies a program. It may be running.
pub(super) fn copy(from: &Path, to: &Path) -> Result<FileChange, Failure> {
    let same = |a: &Path, b: &Path| Some(fs::canonicalize(a).ok()? == fs::canonicalize(b).ok()?);
    if same(from, to) == Some(true) {
        return Ok(FileChange::Unchanged);
    }
    let new = fs::read(from).map_err(at(from))?;
    let old = fs::read(to).ok();
    if old.as_ref() == Some(&new) {
        return Ok(FileChange::Unchanged);
    }
    put(to, &new, 0o755, None)?;
    Ok(if old.is_some() {
        FileChange::Changed
    } else {
        FileChange::Created
    })
}

/// Checks that [`replace`] will succeed, before anything else is changed.
pub(super) fn replaceable(path: &Path) -> Result<(), Failure> {
    // Fails for an immutable file.
    match OpenOptions::new().write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => drop(opened.map_err(at(path))?),
    }
    let new = begin(path)?;
    fs::remove_file(&new.0).map_err(at(&new.0))
}

/// Replaces a text file, keeping owner and mode, or removes it.
pub(super) fn replace(path: &Path, old: Option<&str>, new: Option<&str>) -> Result<FileChange, Failure> {
    replace_as(path, old, new, None)
}

/// As [`replace`]; a file that does not exist gets this owner and mode.
pub(super) fn replace_as(
    path: &Path,
    old: Option<&str>,
    new: Option<&str>,
    lost: Option<Access>,
) -> Result<FileChange, Failure> {
    if old == new {
        return Ok(FileChange::Unchanged);
    }
    let Some(new) = new else { return remove(path) };
    let access = Access::of(path).or(lost);
    let mode = access.map_or(0o644, |access| access.mode);
    let owner = access.map(|access| (access.uid, access.gid));
    put(path, new.as_bytes(), mode, owner)?;
    Ok(if old.is_some() {
        FileChange::Changed
    } else {
        FileChange::Created
    })
}

/// Writes a file that only its owner may read.
pub(super) fn write_private(path: &Path, text: &str) -> Result<(), Failure> {
    put(path, text.as_bytes(), 0o600, None)
}

pub(super) fn remove(path: &Path) -> Result<FileChange, Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(FileChange::Unchanged),
        removed => removed.map(|()| FileChange::Removed).map_err(at(path)),
    }
}

fn put(path: &Path, bytes: &[u8], mode: u32, owner: Option<(u32, u32)>) -> Result<(), Failure> {
    let (new, mut file) = begin(path)?;
    let written = file
        .write_all(bytes)
        .and_then(|()| match file.metadata()? {
            meta if owner.is_some_and(|owner| owner != (meta.uid(), meta.gid())) => {
                let (uid, gid) = owner.unzip();
                unix::fchown(&file, uid, gid)
            }
            _ => Ok(()),
        })
        // After fchown, which clears the set-user-ID bits.
        .and_then(|()| file.set_permissions(fs::Permissions::from_mode(mode)))
        // The name must not last longer than the text if the power fails.
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&new, path));
    written.map_err(|error| {
        let _ = fs::remove_file(&new);
        at(path)(error)
    })
}

/// Creates the temporary file, readable by its owner only, that will be renamed to `path`.
fn begin(path: &Path) -> Result<(PathBuf, fs::File), Failure> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(at(directory))?;
    }
    let mut new = OsString::from(path);
    new.push(".husk-new");
    let new = PathBuf::from(new);
    let _ = fs::remove_file(&new);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)
        .map_err(at(path))?;
    Ok((new, file))
}

/// Names the file of an error, and the remedy where there is one.
pub(super) fn at(path: &Path) -> impl FnOnce(io::Error) -> Failure {
    move |error| {
        let hint = hint(&error, rustix::process::geteuid().is_root());
        Failure::Runtime(format!("{}: {}{hint}", path.display(), failure::chain(&error)))
    }
}

fn hint(error: &io::Error, is_root: bool) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied if !is_root => ": run as root",
        io::ErrorKind::PermissionDenied => ": check whether it or its directory is immutable (`lsattr -d`)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_copied_once_and_can_be_executed() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("husk"), dir.path().join("bin/husk"));
        fs::write(&from, "one").unwrap();
        let copied = || copy(&from, &to).map_err(|_| "failed").unwrap();
        assert_eq!([copied(), copied()], [FileChange::Created, FileChange::Unchanged]);
        fs::write(&from, "two").unwrap();
        assert_eq!(copied(), FileChange::Changed);
        assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(fs::read_dir(dir.path().join("bin")).unwrap().count(), 1);
    }

    #[test]
    fn a_text_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let put = |old, new| replace(&path, old, new).map_err(|_| "failed").unwrap();
        assert_eq!(put(None, Some("a")), FileChange::Created);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(put(Some("a"), Some("b")), FileChange::Changed);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(
            [put(Some("b"), Some("b")), put(Some("b"), None)],
            [FileChange::Unchanged, FileChange::Removed]
        );
        assert!(!path.exists());
    }

    #[test]
    fn a_private_file_is_readable_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        fs::write(&path, "open to all").unwrap();
        assert!(write_private(&path, "a").is_ok());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_to_string(&path).unwrap(), "a");
    }

    #[test]
    fn a_link_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let followed = |name: &str| match followed(&at(name)) {
            Ok(path) => path,
            Err(Failure::Runtime(text)) => PathBuf::from(text),
            Err(_) => PathBuf::new(),
        };
        for (to, link) in [("real", "link"), ("nowhere", "lost")] {
            std::os::unix::fs::symlink(to, at(link)).unwrap();
        }
        fs::write(at("real"), "").unwrap();
        let real = fs::canonicalize(at("real")).unwrap();
        assert_eq!([followed("link"), followed("absent")], [real, at("absent")]);
        let lost = followed("lost").display().to_string();
        assert!(
            lost.contains("lost: the target of this symbolic link, nowhere, does not exist: "),
            "{lost}"
        );
    }

    #[test]
    #[ignore = "needs root"]
    fn a_text_keeps_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        fs::write(&path, "a").unwrap();
        unix::chown(&path, Some(7), Some(8)).unwrap();
        assert!(replace(&path, Some("a"), Some("b")).is_ok());
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (7, 8));
    }

    #[test]
    fn checking_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("etc/config.toml");
        assert!(replaceable(&path).is_ok());
        fs::write(&path, "a").unwrap();
        assert!(replaceable(&path).is_ok());
        assert_eq!(fs::read_to_string(&path).unwrap(), "a");
        assert_eq!(fs::read_dir(dir.path().join("etc")).unwrap().count(), 1);
        assert!(replaceable(&path.join("below")).is_err());
    }

    #[test]
    fn permission_errors_come_with_a_hint() {
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        assert_eq!(hint(&denied, false), ": run as root");
        assert!(hint(&io::Error::from_raw_os_error(libc::EPERM), true).contains("lsattr"));
        assert_eq!(hint(&io::Error::from_raw_os_error(libc::ENOSPC), false), "");
    }
}
