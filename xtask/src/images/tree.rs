//! A root tree, and running its own programs from outside it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder that holds a Debian root filesystem.
#[derive(Debug, Clone)]
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The tree at `root`.
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// Its folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The tree's program `path` (such as `usr/sbin/mke2fs`), run with the tree's own loader and libraries. It sees
    /// this machine's files, so that a release's own tools write an image in that release's format.
    pub fn tool(&self, path: &str) -> Command {
        let mut command = Command::new(self.root.join("usr/lib64/ld-linux-x86-64.so.2"));
        command
            .arg("--library-path")
            .arg(self.root.join("usr/lib/x86_64-linux-gnu"))
            .arg(self.root.join(path));
        command
    }
}
