//! Container images from scratch, of one layer. The archive is one of OCI's, with what `docker load` reads too:
//! `ctr images import`, `docker load` and `skopeo copy oci-archive:` accept it.

use crate::finish::finish;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

const BLOBS: &str = "blobs/sha256";

/// Packs the folder `tree` as the image `name`, with `command` as its command, into the file `archive`. The layer keeps
/// holes, or is packed by `gzip` without them: a disk in that must not be a sparse member.
pub fn pack(tree: &Path, name: &str, command: &[&str], archive: &Path, gzip: bool) -> Result<()> {
    let parts = tempfile::tempdir_in(archive.parent().context("no folder")?)?;
    std::fs::create_dir_all(parts.path().join(BLOBS))?;
    let layer = parts.path().join("layer");
    tar(tree, &layer, !gzip, &["."])?;
    let unpacked = format!("sha256:{}", sha256(&layer)?);
    let layer = if gzip {
        finish(Command::new("gzip").args(["-1", "--no-name"]).arg(&layer))?;
        let packed = layer.with_extension("gz");
        blob(
            parts.path(),
            &packed,
            "application/vnd.oci.image.layer.v1.tar+gzip",
        )?
    } else {
        blob(parts.path(), &layer, "application/vnd.oci.image.layer.v1.tar")?
    };
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": command},
        "rootfs": {"type": "layers", "diff_ids": [unpacked]},
    });
    let config = json_blob(parts.path(), &config, "application/vnd.oci.image.config.v1+json")?;
    let media = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({"schemaVersion": 2, "mediaType": media, "config": config, "layers": [layer]});
    let mut manifest = json_blob(parts.path(), &manifest, media)?;
    let last = name.rsplit('/').next().unwrap_or(name);
    let tag = last.split_once(':').map_or("latest", |(_, tag)| tag);
    manifest["annotations"] = json!({
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": tag,
    });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [manifest],
    });
    let docker = json!([{"Config": path(&config)?, "RepoTags": [name], "Layers": [path(&layer)?]}]);
    let files = [
        ("oci-layout", json!({"imageLayoutVersion": "1.0.0"})),
        ("index.json", index),
        ("manifest.json", docker),
    ];
    for (file, content) in &files {
        std::fs::write(parts.path().join(file), content.to_string())?;
    }
    tar(
        parts.path(),
        archive,
        true,
        &["oci-layout", "index.json", "manifest.json", "blobs"],
    )
}

fn json_blob(folder: &Path, content: &Value, media: &str) -> Result<Value> {
    let file = folder.join("json");
    std::fs::write(&file, content.to_string())?;
    blob(folder, &file, media)
}

/// Moves a file to the blobs; returns its descriptor.
fn blob(folder: &Path, file: &Path, media: &str) -> Result<Value> {
    let digest = sha256(file)?;
    let size = std::fs::metadata(file)?.len();
    std::fs::rename(file, folder.join(BLOBS).join(&digest))?;
    Ok(json!({"mediaType": media, "digest": format!("sha256:{digest}"), "size": size}))
}

fn sha256(file: &Path) -> Result<String> {
    let sum = finish(Command::new("sha256sum").arg(file))?;
    Ok(sum.split_whitespace().next().context("no digest")?.to_owned())
}

/// Path of a blob in the archive.
fn path(descriptor: &Value) -> Result<String> {
    let digest = descriptor["digest"].as_str().context("no digest")?;
    Ok(format!("blobs/{}", digest.replace(':', "/")))
}

/// Keeps holes if it is `sparse`, in the only sparse format that containerd can read.
fn tar(folder: &Path, archive: &Path, sparse: bool, names: &[&str]) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--format=posix", "--numeric-owner", "--owner=0", "--group=0"]);
    if sparse {
        tar.arg("--sparse");
    }
    tar.arg("-C").arg(folder).arg("-cf").arg(archive).args(names);
    finish(&mut tar).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(file: &Path) -> Value {
        serde_json::from_slice(&std::fs::read(file).expect("read")).expect("JSON")
    }

    #[test]
    fn an_image_has_its_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let (tree, archive) = (folder.path().join("tree"), folder.path().join("image.tar"));
        std::fs::create_dir_all(tree.join("boot")).expect("made");
        std::fs::write(tree.join("boot/vmlinuz"), "content").expect("written");
        pack(&tree, "localhost/any:1", &["/none"], &archive, false).expect("packed");
        let mut unpack = Command::new("tar");
        unpack.arg("-C").arg(folder.path()).arg("-xf").arg(&archive);
        finish(&mut unpack).expect("unpacked");
        let index = read(&folder.path().join("index.json"));
        let named = &index["manifests"][0]["annotations"];
        assert_eq!(named["io.containerd.image.name"], "localhost/any:1");
        assert_eq!(named["org.opencontainers.image.ref.name"], "1");
        let blob = |descriptor: &Value| folder.path().join(path(descriptor).expect("a path"));
        let manifest = read(&blob(&index["manifests"][0]));
        let config = read(&blob(&manifest["config"]));
        assert_eq!(config["config"]["Cmd"][0], "/none");
        let layer = &manifest["layers"][0];
        assert_eq!(config["rootfs"]["diff_ids"][0], layer["digest"]);
        let docker = read(&folder.path().join("manifest.json"));
        assert_eq!(docker[0]["Layers"][0], path(layer).expect("a path"));
        assert_eq!(docker[0]["RepoTags"][0], "localhost/any:1");
        let files = finish(Command::new("tar").arg("-tf").arg(blob(layer))).expect("listed");
        assert!(files.contains("./boot/vmlinuz\n"), "{files}");
    }

    #[test]
    fn a_packed_layer_has_no_holes_and_the_digest_of_its_archive() {
        let folder = tempfile::tempdir().expect("a folder");
        let (tree, archive) = (folder.path().join("tree"), folder.path().join("image.tar"));
        std::fs::create_dir(&tree).expect("made");
        let disk = std::fs::File::create(tree.join("disk.img")).expect("made");
        disk.set_len(1 << 20).expect("a hole");
        pack(&tree, "localhost/any:1", &["/none"], &archive, true).expect("packed");
        let mut unpack = Command::new("tar");
        unpack.arg("-C").arg(folder.path()).arg("-xf").arg(&archive);
        finish(&mut unpack).expect("unpacked");
        let blob = |descriptor: &Value| folder.path().join(path(descriptor).expect("a path"));
        let manifest = read(&blob(&read(&folder.path().join("index.json"))["manifests"][0]));
        let config = read(&blob(&manifest["config"]));
        let packed = folder.path().join("layer.gz");
        std::fs::copy(blob(&manifest["layers"][0]), &packed).expect("copied");
        finish(Command::new("gunzip").arg(&packed)).expect("a gzip layer");
        let layer = folder.path().join("layer");
        let digest = sha256(&layer).expect("a digest");
        assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{digest}"));
        assert!(layer.metadata().expect("a layer").len() > 1 << 20);
    }
}
