//! The installed versions of the programs: a directory for each, so that running pods keep theirs.
//!
//! ```text
//! /opt/husk/VERSION/        the programs; never changed while a process runs them
//! /opt/husk/.new/           programs that are being copied
//! /opt/husk/.change         the journal of a change of containerd's configuration
//! /opt/husk/.installation   which containerd has the handler
//! /opt/husk/.lock           held by install and uninstall
//! ```

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::super::PROGRAMS;
use super::super::files::{self, at};
use super::source::Source;
use crate::failure::Failure;

const LOCK: &str = ".lock";
const NEW: &str = ".new";
const JOURNAL: &str = ".change";
const INSTALLATION: &str = ".installation";

/// Number of races with other commands for the directory after which its creation fails.
const RACES: u32 = 1000;

fn installation_in(versions: &Path) -> PathBuf {
    versions.join(INSTALLATION)
}

/// True if `install --restart` has put versions into this directory.
pub(in super::super) fn is_installed_in(versions: &Path) -> bool {
    installation_in(versions).exists()
}

/// The directory of the versions, locked.
#[derive(Debug)]
pub(super) struct Store {
    path: PathBuf,
    _lock: File,
}

impl Store {
    /// Opens the directory; creates it if absent. Waits for another command that has it open.
    pub(super) fn open(path: &Path) -> Result<Store, Failure> {
        let path = std::path::absolute(path).map_err(at(path))?;
        let lock = path.join(LOCK);
        let mut lost = 0;
        loop {
            match fs::create_dir_all(&path) {
                // The other command has removed the directory while this one looked at it. A link to nothing in the
                // path looks the same, again and again.
                Err(error) if error.kind() == ErrorKind::AlreadyExists && lost < RACES => {
                    lost += 1;
                    continue;
                }
                created => created.map_err(at(&path))?,
            }
            let file = match File::create(&lock) {
                // The other command has just removed the directory.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                created => created.map_err(at(&lock))?,
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    eprintln!("another command installs or uninstalls Husk on this node: waiting for it");
                    file.lock().map_err(at(&lock))?;
                }
                Err(TryLockError::Error(error)) => return Err(at(&lock)(error)),
            }
            if is_at(&file, &lock).map_err(at(&lock))? {
                readable_by_all(&path)?;
                return Ok(Store { path, _lock: file });
            }
        }
    }

    /// Path of the record of the installation.
    pub(super) fn installation(&self) -> PathBuf {
        installation_in(&self.path)
    }

    /// Path of the journal.
    pub(super) fn journal(&self) -> PathBuf {
        self.path.join(JOURNAL)
    }

    /// Installs the programs in the directory of their version; returns it, and whether anything was changed.
    pub(super) fn install(&self, source: &Source) -> Result<(PathBuf, bool), Failure> {
        let version = self.path.join(source.version()?);
        let mut wrong = Vec::new();
        for program in PROGRAMS {
            if !same(source.open(program)?, &version.join(program)).map_err(at(&version.join(program)))? {
                wrong.push(program);
            }
        }
        if wrong.is_empty() {
            return Ok((version, false));
        }
        let new = self.path.join(NEW);
        remove_version(&new)?;
        fs::create_dir(&new).map_err(at(&new))?;
        readable_by_all(&new)?;
        for program in &wrong {
            let to = new.join(program);
            copy(source.open(program)?, &to).map_err(at(&to))?;
        }
        if version.exists() {
            // Programs that were lost or damaged. Those that run keep their files.
            for program in &wrong {
                fs::rename(new.join(program), version.join(program)).map_err(at(&version))?;
            }
            fs::remove_dir(&new).map_err(at(&new))?;
        } else {
            fs::rename(&new, &version).map_err(at(&version))?;
        }
        sync(&self.path)?;
        Ok((version, true))
    }

    /// All versions.
    pub(super) fn versions(&self) -> Result<Vec<PathBuf>, Failure> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(at(&self.path))? {
            let path = entry.map_err(at(&self.path))?.path();
            let hidden = path
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            if !hidden && path.is_dir() {
                found.push(path);
            }
        }
        found.sort();
        Ok(found)
    }

    /// Removes the versions for which `needed` is false; returns them.
    pub(super) fn prune(&self, needed: impl Fn(&Path) -> bool) -> Result<Vec<PathBuf>, Failure> {
        remove_version(&self.path.join(NEW))?;
        let mut old = self.versions()?;
        old.retain(|version| !needed(version));
        for version in &old {
            remove_version(version)?;
        }
        Ok(old)
    }

    /// Removes the directory without versions; returns it. Keeps one with other files.
    pub(super) fn remove(self) -> Result<Option<PathBuf>, Failure> {
        // The lock goes last: until then another command waits.
        for file in [self.installation(), self.path.join(LOCK)] {
            files::remove(&file)?;
        }
        Ok(remove_empty(&self.path)?.then_some(self.path))
    }
}

/// True if the path is that of the open file. Another command may have removed it, and a third one made it again.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let open = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (open.dev(), open.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes a directory of programs, but no other files.
fn remove_version(path: &Path) -> Result<(), Failure> {
    for program in PROGRAMS {
        let file = path.join(program);
        match fs::remove_file(&file) {
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Err(at(&file)(error));
            }
            _ => {}
        }
    }
    remove_empty(path).map(drop)
}

/// Removes a directory if it has no files. Returns whether it is gone.
pub(super) fn remove_empty(path: &Path) -> Result<bool, Failure> {
    match fs::remove_dir(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(false),
        Err(error) => Err(at(path)(error)),
    }
}

fn readable_by_all(directory: &Path) -> Result<(), Failure> {
    fs::set_permissions(directory, Permissions::from_mode(0o755)).map_err(at(directory))
}

fn copy(mut from: File, to: &Path) -> io::Result<()> {
    let mut file = File::create_new(to)?;
    io::copy(&mut from, &mut file)?;
    file.set_permissions(Permissions::from_mode(0o755))?;
    file.flush()?;
    file.sync_all()
}

/// True if the file at `path` is executable and has the bytes of `of`.
fn same(mut of: File, path: &Path) -> io::Result<bool> {
    let mut other = match File::open(path) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(false);
        }
        opened => opened?,
    };
    let (meta, wanted) = (other.metadata()?, of.metadata()?);
    if !meta.is_file() || meta.len() != wanted.len() || meta.permissions().mode() & 0o111 != 0o111 {
        return Ok(false);
    }
    let (mut a, mut b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let read = of.read(&mut a)?;
        if read == 0 {
            return Ok(true);
        }
        match other.read_exact(&mut b[..read]) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(false),
            done => done?,
        }
        if a[..read] != b[..read] {
            return Ok(false);
        }
    }
}

/// Makes renames in a directory last through a power failure.
fn sync(directory: &Path) -> Result<(), Failure> {
    let open = File::open(directory).map_err(at(directory))?;
    open.sync_all().map_err(at(directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done<T>(result: Result<T, Failure>) -> T {
        result.unwrap_or_else(|failure| panic!("{failure:?}"))
    }

    #[test]
    fn each_content_has_its_own_version() {
        let dir = tempfile::tempdir().unwrap();
        let (built, store) = (dir.path().join("built"), dir.path().join("opt/husk"));
        fs::create_dir(&built).unwrap();
        let build = |content: &str| {
            for program in PROGRAMS {
                fs::write(built.join(program), format!("{program} {content}")).unwrap();
            }
            done(Source::open_at(&built))
        };
        let store = done(Store::open(&store));
        let one = build("one");
        let (first, changed) = done(store.install(&one));
        assert!(changed);
        assert_eq!(done(store.install(&one)), (first.clone(), false));
        let name = first.file_name().unwrap().to_str().unwrap();
        assert!(
            name.starts_with(concat!(env!("CARGO_PKG_VERSION"), "-")),
            "{name}"
        );
        // Damaged, and cut off.
        fs::write(first.join(PROGRAMS[1]), "damaged").unwrap();
        fs::remove_file(first.join(PROGRAMS[2])).unwrap();
        assert_eq!(done(store.install(&one)), (first.clone(), true));
        assert_eq!(done(store.install(&one)), (first.clone(), false));
        let (second, _) = done(store.install(&build("two")));
        assert_ne!(first, second);
        assert_eq!(
            fs::read_to_string(first.join(PROGRAMS[0])).unwrap(),
            format!("{} one", PROGRAMS[0])
        );
        assert_eq!(done(store.prune(|version| version == second)), [first]);
        assert_eq!(done(store.versions()), std::slice::from_ref(&second));
        let path = store.path.clone();
        assert_eq!(done(store.prune(|_| false)), [second]);
        assert_eq!(done(store.remove()), Some(path.clone()));
        assert!(!path.exists());
    }

    #[test]
    fn other_files_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = done(Store::open(dir.path()));
        fs::create_dir(dir.path().join("own")).unwrap();
        fs::write(dir.path().join("own/notes"), "").unwrap();
        done(store.prune(|_| false));
        assert_eq!(done(store.remove()), None);
        assert!(dir.path().join("own/notes").exists());
    }

    #[test]
    fn a_lock_file_that_was_made_again_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let lock = dir.path().join(LOCK);
        let file = File::create(&lock).unwrap();
        assert!(is_at(&file, &lock).unwrap());
        fs::remove_file(&lock).unwrap();
        assert!(!is_at(&file, &lock).unwrap());
        File::create(&lock).unwrap();
        assert!(!is_at(&file, &lock).unwrap());
    }

    #[test]
    fn other_things_at_the_path_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        File::create(&file).unwrap();
        std::os::unix::fs::symlink(dir.path().join("absent"), &link).unwrap();
        for path in [file, link.clone(), link.join("husk")] {
            assert!(Store::open(&path).is_err(), "{}", path.display());
        }
    }

    #[test]
    fn commands_follow_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("husk");
        let holders = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let store = done(Store::open(&path));
                        assert_eq!(holders.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        holders.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        done(store.remove());
                    }
                });
            }
        });
    }

    #[test]
    fn an_interrupted_copy_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let (built, path) = (dir.path().join("built"), dir.path().join("husk"));
        fs::create_dir(&built).unwrap();
        fs::create_dir_all(path.join(NEW)).unwrap();
        for program in PROGRAMS {
            fs::write(built.join(program), program).unwrap();
            fs::write(path.join(NEW).join(program), "half").unwrap();
        }
        let store = done(Store::open(&path));
        let (version, _) = done(store.install(&done(Source::open_at(&built))));
        assert_eq!(fs::read_to_string(version.join("husk")).unwrap(), "husk");
        assert!(!path.join(NEW).exists());
    }
}
