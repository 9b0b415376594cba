//! Container images from scratch: one layer, packed as `docker save` does.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::path::Path;
use std::process::Command;

const LAYER: &str = "layer.tar";

/// Packs the folder `tree` as the image `name`, with `command` as its command, into the file `archive`.
pub fn pack(tree: &Path, name: &str, command: &[&str], archive: &Path) -> Result<()> {
    let parts = tempfile::tempdir_in(archive.parent().context("no folder")?)?;
    let layer = parts.path().join(LAYER);
    tar(tree, &layer, &["."])?;
    let sum = said(Command::new("sha256sum").arg(&layer))?;
    let digest = sum.split_whitespace().next().context("no digest")?;
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": command},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
    });
    let manifest = json!([{"Config": "config.json", "RepoTags": [name], "Layers": [LAYER]}]);
    for (file, content) in [("config.json", config), ("manifest.json", manifest)] {
        std::fs::write(parts.path().join(file), content.to_string())?;
    }
    tar(parts.path(), archive, &["manifest.json", "config.json", LAYER])
}

/// Keeps holes, in the only sparse format that containerd can read.
fn tar(folder: &Path, archive: &Path, names: &[&str]) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args([
        "--format=posix",
        "--sparse",
        "--numeric-owner",
        "--owner=0",
        "--group=0",
    ]);
    tar.arg("-C").arg(folder).arg("-cf").arg(archive).args(names);
    said(&mut tar).map(drop)
}

fn said(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{command:?}: {}: {errors}",
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_its_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let (tree, archive) = (folder.path().join("tree"), folder.path().join("image.tar"));
        std::fs::create_dir_all(tree.join("boot")).expect("made");
        std::fs::write(tree.join("boot/vmlinuz"), "content").expect("written");
        pack(&tree, "localhost/any:1", &["/none"], &archive).expect("packed");
        let list = |archive: &Path| said(Command::new("tar").arg("-tf").arg(archive)).expect("listed");
        assert_eq!(list(&archive), "manifest.json\nconfig.json\nlayer.tar\n");
        said(
            Command::new("tar")
                .arg("-C")
                .arg(folder.path())
                .arg("-xf")
                .arg(&archive),
        )
        .expect("unpacked");
        assert!(list(&folder.path().join(LAYER)).contains("./boot/vmlinuz\n"));
    }
}
