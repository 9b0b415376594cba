//! Paths of the checkout, of its build products, and of the cache that outlives it.

use anyhow::{Context, Result};
use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The checkout's root folder.
pub fn root() -> &'static Path {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest)
}

/// `target/` of this checkout.
pub fn target() -> PathBuf {
    root().join("target")
}

/// Folder of the release binaries.
pub fn release() -> PathBuf {
    target().join("release")
}

/// Husk's cache, shared by all checkouts of one user: `$XDG_CACHE_HOME/husk` or `~/.cache/husk`.
/// Created if absent.
pub fn cache() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME is set")?;
    folder(base.join("husk"))
}

/// The cargo that runs this program, or the one on PATH.
pub fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Creates the folder `path` and its missing parents. If root creates them in a user's folder, that user owns them.
pub fn folder(path: PathBuf) -> Result<PathBuf> {
    make(&path).with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}

/// Makes the folder `place` unless it exists: `build` fills a temporary folder beside it, which is then renamed. One
/// command at a time builds in a parent folder.
pub fn build_once(place: &Path, build: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if place.exists() {
        return Ok(());
    }
    let parent = place
        .parent()
        .with_context(|| format!("{} has no parent", place.display()))?;
    let _lock = lock(&parent.join("lock"), &format!("builds in {}", parent.display()))?;
    if place.exists() {
        return Ok(());
    }
    let aside = parent.join("unfinished");
    remove(&aside)?;
    build(&folder(aside.clone())?)?;
    std::fs::rename(&aside, place).with_context(|| format!("cannot place {}", place.display()))
}

/// Waits for the exclusive lock on the file `path`, which is created if it is absent; `what` says what its holder does.
/// Held until the result is dropped.
pub fn lock(path: &Path, what: &str) -> Result<File> {
    if let Some(parent) = path.parent() {
        folder(parent.to_owned())?;
    }
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        eprintln!("another command {what}: waiting for it");
        file.lock()?;
    }
    Ok(file)
}

/// Removes the folder `path`, if it is there, with all that it contains.
pub fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn make(path: &Path) -> std::io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        make(parent)?;
    }
    match std::fs::create_dir(path) {
        // Another command created it at this moment.
        Err(_) if path.is_dir() => return Ok(()),
        result => result?,
    }
    if let Some(parent) = parent
        && rustix::process::geteuid().is_root()
    {
        let owner = parent.metadata()?;
        std::os::unix::fs::chown(path, Some(owner.uid()), Some(owner.gid()))?;
    }
    Ok(())
}

/// The command line that runs `cargo xtask ARGUMENTS` as root for this user.
pub fn as_root(arguments: &str) -> String {
    // The benchmarks are another program beside it.
    let this = std::env::current_exe().unwrap_or_else(|_| target().join("debug/xtask"));
    let xtask = this.with_file_name("xtask");
    format!("sudo \"HOME=$HOME\" {} {arguments}", xtask.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_told_to_run_xtask() {
        let line = as_root("lab image");
        assert!(line.ends_with("/xtask lab image"), "{line}");
    }

    #[test]
    fn a_folder_is_built_once_and_only_as_a_whole() {
        let temporary = tempfile::tempdir().expect("a folder");
        let place = temporary.path().join("new/place");
        let built = |text: &'static str, ends: bool| {
            build_once(&place, |aside| {
                std::fs::write(aside.join("file"), text)?;
                std::fs::write(aside.join(text), "")?;
                anyhow::ensure!(ends, "it does not end");
                Ok(())
            })
        };
        built("broken", false).expect_err("the build fails");
        assert!(!place.exists());
        built("first", true).expect("built");
        built("second", true).expect("there already");
        let text = std::fs::read_to_string(place.join("file")).expect("the file");
        assert_eq!(text, "first");
        assert!(!place.join("broken").exists(), "left by the build that failed");
    }

    #[test]
    fn folders_are_made_once() {
        let temporary = tempfile::tempdir().expect("a folder");
        let deep = temporary.path().join("a/b/c");
        assert_eq!(folder(deep.clone()).expect("made"), deep);
        assert!(deep.is_dir());
        folder(deep.clone()).expect("there already");
        std::fs::write(deep.join("file"), "").expect("written");
        let error = folder(deep.join("file/d")).expect_err("a file is in the way");
        assert!(error.to_string().contains("file/d"), "{error}");
    }
}
