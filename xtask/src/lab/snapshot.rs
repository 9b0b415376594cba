//! A saved state of a booted lab, from which labs start in about two seconds.
//!
//! One snapshot serves all labs of this user: it is taken before the folders of a checkout are plugged in. Its folder in
//! the cache is named by a hash of the image and of QEMU's options, so that a change of either makes a new one.

use super::image::Image;
use crate::checkout;
use crate::finish::finish;
use crate::qmp::Qmp;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Maximum time for saving or restoring a snapshot.
const LIMIT: Duration = Duration::from_secs(120);

/// Prefix of the folders' names.
const PREFIX: &str = "snapshot-";

/// A snapshot, which may not have been made yet.
#[derive(Debug)]
pub struct Snapshot {
    folder: PathBuf,
}

impl Snapshot {
    /// The snapshot for `key`, a hash of everything that it depends on.
    pub fn find(key: &str) -> Result<Self> {
        let folder = checkout::cache()?.join("lab").join(format!("{PREFIX}{key}"));
        Ok(Self { folder })
    }

    /// True if the snapshot has been made.
    pub fn exists(&self) -> bool {
        self.memory().exists()
    }

    /// The disk of the saved lab, a qcow2 image over the lab's image.
    pub fn disk(&self) -> PathBuf {
        self.folder.join("disk.qcow2")
    }

    fn memory(&self) -> PathBuf {
        self.folder.join("memory")
    }

    /// Waits for the lock that is needed to make it.
    pub fn lock(&self) -> Result<File> {
        let file = File::create(self.folder.with_extension("lock"))?;
        file.lock()?;
        Ok(file)
    }

    /// Makes an empty folder with the disk of a lab that is about to be saved, and removes snapshots of other hashes.
    pub fn prepare(&self, image: &Image) -> Result<()> {
        let parent = self.folder.parent().context("the cache has a parent")?;
        for entry in std::fs::read_dir(parent)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(PREFIX) && entry.path().is_dir() {
                // A lab that was restored from it has its files open.
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
        checkout::folder(self.folder.clone())?;
        let mut command = image.command("usr/bin/qemu-img");
        command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
        finish(command.arg(image.disk()).arg(self.disk())).map(drop)
    }

    /// Saves the memory and devices of the lab whose control socket is `socket`. The lab stays paused afterwards.
    pub fn save(&self, socket: &Path) -> Result<()> {
        let aside = self.folder.join("memory.unfinished");
        let mut qmp = Qmp::connect(socket)?;
        qmp.execute("stop", json!({}))?;
        mapped_ram(&mut qmp)?;
        qmp.execute("migrate", json!({ "uri": format!("file:{}", aside.display()) }))?;
        finished(&mut qmp)?;
        // QEMU flushes its buffers of the disk when it exits.
        qmp.execute("quit", json!({}))?;
        std::fs::rename(&aside, self.memory()).context("cannot place the snapshot")
    }

    /// Loads the snapshot into the QEMU whose control socket is `socket`, which was started with `-incoming defer`, and
    /// starts the lab.
    pub fn load(&self, socket: &Path) -> Result<()> {
        let mut qmp = Qmp::connect(socket)?;
        mapped_ram(&mut qmp)?;
        qmp.execute(
            "migrate-incoming",
            json!({ "uri": format!("file:{}", self.memory().display()) }),
        )?;
        finished(&mut qmp)?;
        qmp.execute("cont", json!({}))?;
        Ok(())
    }

    /// Removes the snapshot.
    pub fn remove(&self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Sets QEMU's `mapped-ram` format, in which each page has a fixed offset in the file.
fn mapped_ram(qmp: &mut Qmp) -> Result<()> {
    let capabilities = json!({ "capabilities": [{ "capability": "mapped-ram", "state": true }] });
    qmp.execute("migrate-set-capabilities", capabilities)?;
    Ok(())
}

/// Waits for the end of a migration.
fn finished(qmp: &mut Qmp) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let state = qmp.execute("query-migrate", json!({}))?;
        match state["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => bail!(
                "{}",
                state["error-desc"].as_str().unwrap_or("QEMU gives no reason")
            ),
            _ if Instant::now() > deadline => bail!("not done after {} s", LIMIT.as_secs()),
            _ => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}
