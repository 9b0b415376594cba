//! Volumes that are plugged in while a pod's VM runs.

use super::ctr::vm;
use crate::cases::hotplug::{comes, goes, settle};
use crate::harness::TIMEOUT;
use crate::harness::containerd::Containerd;
use crate::harness::context::CommandResult;
use crate::harness::guest::Shell;
use anyhow::Result;
use serde_json::json;
use std::fs::File;

/// Path of plugged volumes in a pod.
const HOTPLUG: &str = "/var/run/kubevirt/hotplug-disks";

/// Volumes in the pod's hotplug directory are plugged and unplugged, on request or with the VMI; other paths are
/// refused.
pub fn plugged(c: &Containerd<'_>) -> Result<()> {
    let ctx = c.ctx();
    let folder = ctx.path("hotplug");
    std::fs::create_dir_all(&folder)?;
    let mount = format!(
        "type=bind,src={},dst={HOTPLUG},options=rbind:rslave:rw",
        folder.display()
    );
    let plain = vm("scsi,shell");
    let session = c.on_terminal(&plain, &["--mount", &mount], "small", "plugged")?;
    session.expect("husk-scsi: end\n", TIMEOUT)?;
    let shell = Shell::small_on(&session)?;
    settle(&shell)?;
    let add = |path: &str| -> Result<CommandResult> {
        ctx.run(&[
            "addvolume",
            "pods/plugged",
            "--volume-name",
            "data",
            "--path",
            path,
        ])
    };

    let elsewhere = ctx.path("elsewhere.img");
    File::create(&elsewhere)?.set_len(16 << 20)?;
    std::os::unix::fs::symlink(&elsewhere, folder.join("link.img"))?;
    add(&elsewhere.display().to_string())?.fails_with(
        1,
        &["is not in a mount, the devices or the hotplug directory of this pod"],
    )?;
    add(&format!("{HOTPLUG}/link.img"))?.fails(1)?;

    File::create(folder.join("data.img"))?.set_len(16 << 20)?;
    add(&format!("{HOTPLUG}/data.img"))?.ok()?;
    let disk = comes(&shell, "data")?;
    shell.ok(&format!("test $(cat /sys/block/{disk}/size) = 32768"))?;
    ctx.run(&["removevolume", "pods/plugged", "--volume-name", "data"])?
        .ok()?;
    goes(&shell, "data")?;

    let source = json!({"dataVolume": {"name": "any", "hotpluggable": true}});
    let wanted = plain
        .clone()
        .device("data", json!({"disk": {"bus": "scsi"}}), source);
    for (manifest, does) in [(&wanted, "added volume data"), (&plain, "removed volume data")] {
        let file = ctx.path("synced.json");
        std::fs::write(&file, manifest.json())?;
        let mut sync = ctx.husk(&["sync", "pods/plugged", "-f"]);
        sync.arg(&file);
        ctx.finish(sync, TIMEOUT)?.says(&[does])?;
        match does.starts_with("added") {
            true => drop(comes(&shell, "data")?),
            false => goes(&shell, "data")?,
        }
    }
    session.send("poweroff -f\n")?;
    session.wait(TIMEOUT)?.ok()?;
    c.nothing_left()
}
