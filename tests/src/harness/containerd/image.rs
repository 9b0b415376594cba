//! Container images from scratch, which contain only the files that cases add.

use super::Containerd;
use crate::harness::context::TestContext;
use crate::harness::images::Small;
use anyhow::Result;
use rustix::fs::{CWD, Mode, mkfifoat};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Packs an image as the benchmarks do; the tests are a separate crate.
#[path = "../../../../xtask/src/container_image.rs"]
mod container_image;

/// Image of CRI's sandboxes.
pub const PAUSE: &str = "localhost/husk/pause:1";
/// Path of the kernel in the image of [`Image::kernel`].
pub const KERNEL: &str = "/boot/vmlinuz";
/// Path of its initramfs.
pub const INITRD: &str = "/boot/initrd";
/// Time limit for copying or importing an image.
const PACKING: Duration = Duration::from_secs(300);

/// containerd's name of the image `image`.
pub fn name(image: &str) -> String {
    format!("localhost/husk/{image}:1")
}

/// An image's files.
#[derive(Debug)]
pub struct Image<'s> {
    ctx: &'s TestContext,
    name: String,
    folder: PathBuf,
    command: Vec<String>,
}

impl<'s> Image<'s> {
    /// An image without files.
    pub fn new(ctx: &'s TestContext, name: &str) -> Result<Self> {
        let folder = ctx.path(&format!("images/{name}"));
        std::fs::create_dir_all(folder.join("tree"))?;
        Ok(Self {
            ctx,
            name: name.to_owned(),
            folder,
            command: vec!["/none".to_owned()],
        })
    }

    /// Adds a kernel as Debian ships it, and its initramfs.
    pub fn kernel(self, small: &Small) -> Result<Self> {
        let small = small.clone().packed();
        self.file(KERNEL, &small.kernel)?.file(INITRD, &small.initrd)
    }

    /// Adds a copy of the file `from`.
    pub fn file(self, path: &str, from: &Path) -> Result<Self> {
        let to = self.place(path)?;
        let mut copy = Command::new("cp");
        copy.arg("--sparse=always").arg(from).arg(&to);
        self.ctx.finish(copy, PACKING)?.ok()?;
        Ok(self)
    }

    /// Adds a file of these bytes.
    pub fn bytes(self, path: &str, bytes: &[u8]) -> Result<Self> {
        std::fs::write(self.place(path)?, bytes)?;
        Ok(self)
    }

    /// Adds a symbolic link.
    pub fn link(self, path: &str, to: &str) -> Result<Self> {
        std::os::unix::fs::symlink(to, self.place(path)?)?;
        Ok(self)
    }

    /// Adds a FIFO.
    pub fn fifo(self, path: &str) -> Result<Self> {
        mkfifoat(CWD, self.place(path)?, Mode::RWXU)?;
        Ok(self)
    }

    /// Sets the command of containers that are not VMs.
    pub fn command(mut self, words: &[&str]) -> Self {
        self.command = words.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Path of a file in the image. Creates the file's folder.
    pub fn place(&self, path: &str) -> Result<PathBuf> {
        let to = self.folder.join("tree").join(path.trim_start_matches('/'));
        if let Some(parent) = to.parent() {
            std::fs::create_dir_all(parent)?;
        }
        Ok(to)
    }

    /// Packs the image and imports it into containerd, in the namespace of `ctr` or that of CRI.
    pub fn import(self, containerd: &Containerd<'_>, namespace: &str) -> Result<()> {
        let (tree, archive) = (self.folder.join("tree"), self.folder.join("image.tar"));
        let command: Vec<&str> = self.command.iter().map(String::as_str).collect();
        container_image::pack(&tree, &name(&self.name), &command, &archive, false)?;
        let words = ["--namespace", namespace, "images", "import"];
        let mut import = containerd.ctr_command(&words);
        import.arg(&archive);
        self.ctx.finish(import, PACKING)?.ok()?;
        Ok(std::fs::remove_dir_all(&self.folder)?)
    }
}
