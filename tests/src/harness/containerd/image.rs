//! Container images from scratch, which hold nothing but what cases put in.

use super::Containerd;
use crate::harness::images::Small;
use crate::harness::scene::Scene;
use anyhow::{Context, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What CRI makes sandboxes of.
pub const PAUSE: &str = "localhost/husk/pause:1";
/// The kernel of [`Image::kernel`] in its image.
pub const KERNEL: &str = "/boot/vmlinuz";
/// The initramfs beside it.
pub const INITRD: &str = "/boot/initrd";
/// How long an image may take to be packed, or imported.
const PACKING: Duration = Duration::from_secs(300);

/// What containerd calls the image `image`.
pub fn name(image: &str) -> String {
    format!("localhost/husk/{image}:1")
}

/// An image's files.
#[derive(Debug)]
pub struct Image<'s> {
    scene: &'s Scene,
    name: String,
    folder: PathBuf,
    command: Vec<String>,
}

impl<'s> Image<'s> {
    /// One without any.
    pub fn new(scene: &'s Scene, name: &str) -> Result<Self> {
        let folder = scene.path(&format!("images/{name}"));
        std::fs::create_dir_all(folder.join("tree"))?;
        Ok(Self {
            scene,
            name: name.to_owned(),
            folder,
            command: vec!["/none".to_owned()],
        })
    }

    /// A kernel and its initramfs.
    pub fn kernel(self, small: &Small) -> Result<Self> {
        self.file(KERNEL, &small.kernel)?.file(INITRD, &small.initrd)
    }

    /// A copy of the file `from`.
    pub fn file(self, path: &str, from: &Path) -> Result<Self> {
        let to = self.place(path)?;
        let mut copy = Command::new("cp");
        copy.arg("--sparse=always").arg(from).arg(&to);
        self.scene.finish(copy, PACKING)?.ok()?;
        Ok(self)
    }

    /// A file of these bytes.
    pub fn bytes(self, path: &str, bytes: &[u8]) -> Result<Self> {
        std::fs::write(self.place(path)?, bytes)?;
        Ok(self)
    }

    /// A symbolic link.
    pub fn link(self, path: &str, to: &str) -> Result<Self> {
        std::os::unix::fs::symlink(to, self.place(path)?)?;
        Ok(self)
    }

    /// A FIFO.
    pub fn fifo(self, path: &str) -> Result<Self> {
        nix::unistd::mkfifo(&self.place(path)?, nix::sys::stat::Mode::S_IRWXU)?;
        Ok(self)
    }

    /// What a container of it runs where no VM does.
    pub fn command(mut self, words: &[&str]) -> Self {
        self.command = words.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Where a file of it is, whose folder is made.
    pub fn place(&self, path: &str) -> Result<PathBuf> {
        let to = self.folder.join("tree").join(path.trim_start_matches('/'));
        if let Some(parent) = to.parent() {
            std::fs::create_dir_all(parent)?;
        }
        Ok(to)
    }

    /// Packs it and has containerd import it, in the namespace of `ctr` or that of CRI.
    pub fn import(self, containerd: &Containerd<'_>, namespace: &str) -> Result<()> {
        let layer = self.folder.join("layer.tar");
        let mut pack = Command::new("tar");
        pack.args([
            "--format=posix",
            "--sparse",
            "--numeric-owner",
            "--owner=0",
            "--group=0",
            "-C",
        ])
        .arg(self.folder.join("tree"))
        .arg("-cf")
        .arg(&layer)
        .arg(".");
        self.scene.finish(pack, PACKING)?.ok()?;
        std::fs::remove_dir_all(self.folder.join("tree"))?;
        let mut sum = Command::new("sha256sum");
        sum.arg(&layer);
        let said = self.scene.finish(sum, PACKING)?.ok()?;
        let digest = said.split_whitespace().next().context("no digest")?;
        let config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": self.command},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
        });
        let manifest =
            json!([{"Config": "config.json", "RepoTags": [name(&self.name)], "Layers": ["layer.tar"]}]);
        std::fs::write(self.folder.join("config.json"), config.to_string())?;
        std::fs::write(self.folder.join("manifest.json"), manifest.to_string())?;
        let archive = self.folder.join("image.tar");
        let mut pack = Command::new("tar");
        pack.arg("-C").arg(&self.folder).arg("-cf").arg(&archive).args([
            "manifest.json",
            "config.json",
            "layer.tar",
        ]);
        self.scene.finish(pack, PACKING)?.ok()?;
        std::fs::remove_file(&layer)?;
        let words = ["--namespace", namespace, "images", "import"];
        let mut import = containerd.ctr_command(&words);
        import.arg(&archive);
        self.scene.finish(import, PACKING)?.ok()?;
        Ok(std::fs::remove_dir_all(&self.folder)?)
    }
}
