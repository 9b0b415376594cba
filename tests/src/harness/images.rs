//! The guest images that `cargo xtask images` makes.

use anyhow::{Context, Result, ensure};
use std::path::PathBuf;

/// A kernel and a small initramfs whose `/init` runs the commands in `husk.do=` on the command line.
#[derive(Debug, Clone)]
pub struct Small {
    /// The kernel: an ELF file, because a guest that unpacks its kernel takes twice the time to boot.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
}

impl Small {
    /// The same with the kernel as Debian ships it, a bzImage.
    pub fn packed(mut self) -> Self {
        self.kernel.set_file_name("vmlinuz");
        self
    }
}

/// The image `initramfs-VERSION`.
pub fn small(version: &str) -> Result<Small> {
    let folder = folder(&format!("initramfs-{version}"))?;
    Ok(Small {
        kernel: folder.join("vmlinux"),
        initrd: folder.join("initrd"),
    })
}

/// The whole disk of the image called `name`.
pub fn disk(name: &str) -> Result<PathBuf> {
    Ok(folder(name)?.join("disk.img"))
}

fn folder(name: &str) -> Result<PathBuf> {
    let all = match std::env::var_os("HUSK_IMAGES").filter(|value| !value.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
            .context("HUSK_IMAGES, XDG_CACHE_HOME and HOME are not set")?
            .join("husk/images"),
    };
    let folder = all.join(name);
    ensure!(
        folder.join("recipe").exists(),
        "{} is not there: run cargo xtask images {name}, or set HUSK_IMAGES",
        folder.display()
    );
    Ok(folder)
}
