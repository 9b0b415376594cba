//! Container images as OCI layouts.

use super::context::TestContext;
use anyhow::{Result, ensure};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An OCI layout called `name` with one layer, which holds the files in `folder`.
pub fn layout(ctx: &TestContext, name: &str, folder: &Path) -> Result<PathBuf> {
    let layout = ctx.path(name);
    let blobs = layout.join("blobs/sha256");
    std::fs::create_dir_all(&blobs)?;
    let blob = |from: &Path, kind: &str| -> Result<serde_json::Value> {
        let sum = Command::new("sha256sum").arg(from).output()?.stdout;
        let digest = String::from_utf8_lossy(&sum)[..64].to_owned();
        let size = std::fs::metadata(from)?.len();
        std::fs::rename(from, blobs.join(&digest))?;
        let media_type = format!("application/vnd.oci.image.{kind}");
        Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size}))
    };
    let write = |name: &str, value: &serde_json::Value| -> Result<PathBuf> {
        let path = layout.join(name);
        std::fs::write(&path, value.to_string())?;
        Ok(path)
    };
    let archive = layout.join("layer.tar.gz");
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(folder).arg("-czf").arg(&archive).arg(".");
    ensure!(tar.status()?.success(), "{tar:?}");
    let layer = blob(&archive, "layer.v1.tar+gzip")?;
    let config = blob(&write("config", &json!({}))?, "config.v1+json")?;
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": [layer]});
    let manifest = blob(&write("manifest", &manifest)?, "manifest.v1+json")?;
    write(
        "index.json",
        &json!({"schemaVersion": 2, "manifests": [manifest]}),
    )?;
    write("oci-layout", &json!({"imageLayoutVersion": "1.0.0"}))?;
    Ok(layout)
}
