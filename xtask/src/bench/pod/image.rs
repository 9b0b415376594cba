//! A container image from scratch, with a kernel and its initrd.

use super::containerd::finish;
use anyhow::{Context, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What containerd calls it.
pub const NAME: &str = "localhost/husk/bench:1";
/// The kernel in it.
pub const KERNEL: &str = "/boot/vmlinuz";
/// The initrd in it.
pub const INITRD: &str = "/boot/initrd";

/// Packs it below `folder`, as `docker save` does.
pub fn pack(folder: &Path, kernel: &Path, initrd: &Path) -> Result<PathBuf> {
    let (archive, parts) = (folder.join("image.tar"), tempfile::tempdir_in(folder)?);
    let tree = parts.path().join("tree");
    for (from, to) in [(kernel, KERNEL), (initrd, INITRD)] {
        let to = tree.join(to.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().context("no folder")?)?;
        std::fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    tar(&tree, &parts.path().join("layer.tar"), &["."])?;
    let sum = finish(Command::new("sha256sum").arg(parts.path().join("layer.tar")))?;
    let digest = sum.split_whitespace().next().context("no digest")?;
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/none"]},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
    });
    let manifest = json!([{"Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}]);
    for (name, content) in [("config.json", config), ("manifest.json", manifest)] {
        std::fs::write(parts.path().join(name), content.to_string())?;
    }
    tar(
        parts.path(),
        &archive,
        &["manifest.json", "config.json", "layer.tar"],
    )?;
    Ok(archive)
}

fn tar(folder: &Path, archive: &Path, names: &[&str]) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args([
        "--format=posix",
        "--numeric-owner",
        "--owner=0",
        "--group=0",
        "-C",
    ])
    .arg(folder)
    .arg("-cf")
    .arg(archive)
    .args(names);
    finish(&mut tar)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_its_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("any");
        std::fs::write(&file, "content").expect("written");
        let archive = pack(folder.path(), &file, &file).expect("packed");
        let list = |archive: &Path| finish(Command::new("tar").arg("-tf").arg(archive)).expect("listed");
        assert_eq!(list(&archive), "manifest.json\nconfig.json\nlayer.tar\n");
        tar_out(&archive, folder.path());
        let layer = list(&folder.path().join("layer.tar"));
        for path in [KERNEL, INITRD] {
            assert!(layer.contains(&format!(".{path}\n")), "{layer}");
        }
    }

    fn tar_out(archive: &Path, folder: &Path) {
        let mut tar = Command::new("tar");
        finish(tar.arg("-C").arg(folder).arg("-xf").arg(archive)).expect("unpacked");
    }
}
