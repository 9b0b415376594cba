//! Where things are: the checkout, its build products, the cache that outlives it.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// The checkout's root folder.
pub fn root() -> &'static Path {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest)
}

/// `target/` of this checkout.
pub fn target() -> PathBuf {
    root().join("target")
}

/// Where release binaries are built.
pub fn release() -> PathBuf {
    target().join("release")
}

/// Husk's cache, shared by all checkouts of one user: `$XDG_CACHE_HOME/husk` or `~/.cache/husk`.
/// Made if absent.
pub fn cache() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME is set")?;
    folder(base.join("husk"))
}

/// Makes the folder `path` if absent.
pub fn folder(path: PathBuf) -> Result<PathBuf> {
    std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}
