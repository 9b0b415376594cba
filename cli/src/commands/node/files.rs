//! Files of a node, replaced whole: whoever reads one sees the old or the new.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    Made,
    Changed,
    Removed,
    Unchanged,
}

/// A file's text; nothing where there is none.
pub(super) fn text(path: &Path) -> Result<Option<String>, Failure> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => Ok(Some(read.map_err(at(path))?)),
    }
}

/// Copies a program, which may run.
pub(super) fn copy(from: &Path, to: &Path) -> Result<Done, Failure> {
    let same = |a: &Path, b: &Path| Some(fs::canonicalize(a).ok()? == fs::canonicalize(b).ok()?);
    if same(from, to) == Some(true) {
        return Ok(Done::Unchanged);
    }
    let new = fs::read(from).map_err(at(from))?;
    let old = fs::read(to).ok();
    if old.as_ref() == Some(&new) {
        return Ok(Done::Unchanged);
    }
    put(to, &new, 0o755)?;
    Ok(if old.is_some() { Done::Changed } else { Done::Made })
}

/// Replaces a text file, or removes it.
pub(super) fn replace(path: &Path, old: Option<&str>, new: Option<&str>) -> Result<Done, Failure> {
    if old == new {
        return Ok(Done::Unchanged);
    }
    let Some(new) = new else { return remove(path) };
    let mode = fs::metadata(path).map_or(0o644, |meta| meta.permissions().mode() & 0o777);
    put(path, new.as_bytes(), mode)?;
    Ok(if old.is_some() { Done::Changed } else { Done::Made })
}

pub(super) fn remove(path: &Path) -> Result<Done, Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Done::Unchanged),
        removed => removed.map(|()| Done::Removed).map_err(at(path)),
    }
}

fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<(), Failure> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(at(directory))?;
    }
    let mut new = OsString::from(path);
    new.push(".husk-new");
    let new = PathBuf::from(new);
    let written = fs::write(&new, bytes)
        .and_then(|()| fs::set_permissions(&new, fs::Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&new, path));
    written.map_err(|error| {
        let _ = fs::remove_file(&new);
        at(path)(error)
    })
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Failure {
    Failure::at(path.display().to_string())
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
        assert_eq!([copied(), copied()], [Done::Made, Done::Unchanged]);
        fs::write(&from, "two").unwrap();
        assert_eq!(copied(), Done::Changed);
        assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(fs::read_dir(dir.path().join("bin")).unwrap().count(), 1);
    }

    #[test]
    fn a_text_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let put = |old, new| replace(&path, old, new).map_err(|_| "failed").unwrap();
        assert_eq!(put(None, Some("a")), Done::Made);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(put(Some("a"), Some("b")), Done::Changed);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(
            [put(Some("b"), Some("b")), put(Some("b"), None)],
            [Done::Unchanged, Done::Removed]
        );
        assert!(!path.exists());
    }
}
