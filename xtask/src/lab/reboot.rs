//! Reboots of a lab, which keeps its disk.

use super::state::{Lab, LabFolder};
use super::{boot, ssh};
use crate::progress::Progress;
use crate::qmp::Qmp;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::time::{Duration, Instant};

/// Maximum time until the lab has shut down and boots again. Guests in it may use up their grace periods.
const LIMIT: Duration = Duration::from_secs(900);
/// Maximum time of a command in the lab, which may be busy.
const COMMAND: Duration = Duration::from_secs(60);

/// How a lab ends before it boots again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its systemd shuts it down.
    ShutDown,
    /// At once: what was not yet on its disk is lost, as by a power cut.
    PowerCut,
}

/// Boots lab `number` again. Commands that run in it are ended.
///
/// # Errors
/// Fails if no lab runs, or if it does not boot within 15 minutes.
pub fn reboot(progress: &Progress, number: u32, end: End) -> Result<()> {
    let dir = LabFolder::find(number)?;
    let _lock = dir.lock()?;
    let mut lab = boot::running(&dir).context("the lab is not up: run cargo xtask lab up")?;
    let step = progress.step(match end {
        End::ShutDown => "rebooting the lab".to_owned(),
        End::PowerCut => "cutting the lab's power".to_owned(),
    });
    let before = boot_id(&lab).context("the lab does not answer")?;
    let mut qmp = Qmp::connect(&lab.sockets.join("qmp"))?;
    // Other commands wait for the lock then, and do not take the lab for one that hangs.
    lab.booted = false;
    dir.write(&lab)?;
    let rebooted = boot_again(&dir, &lab, &mut qmp, end, &before);
    let restored = qmp.execute("set-action", json!({ "reboot": "shutdown" }));
    if lab.alive() {
        lab.booted = true;
        dir.write(&lab)?;
    }
    rebooted.and(restored.map(drop))?;
    step.done();
    Ok(())
}

/// Ends the lab and waits until it has booted, which changes its boot id from `before`.
fn boot_again(dir: &LabFolder, lab: &Lab, qmp: &mut Qmp, end: End, before: &str) -> Result<()> {
    // QEMU was started with -no-reboot, so that a lab that crashes ends.
    qmp.execute("set-action", json!({ "reboot": "reset" }))?;
    match end {
        End::ShutDown => {
            let asked = ssh::quietly(lab.port, "systemctl --no-block reboot", COMMAND);
            if !matches!(asked, Some((Some(0), _))) {
                bail!("the lab's systemd refuses to reboot");
            }
        }
        End::PowerCut => {
            qmp.execute("system_reset", json!({}))?;
        }
    }
    let deadline = Instant::now() + LIMIT;
    while boot_id(lab).is_none_or(|id| id == before) {
        if !lab.alive() {
            bail!(
                "the lab ended instead of rebooting: see {}",
                dir.folder().display()
            );
        }
        if Instant::now() > deadline {
            bail!("the lab did not boot again within {} s", LIMIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    boot::attach(lab)
}

/// The id that the lab's kernel has until it boots again, if it answers.
fn boot_id(lab: &Lab) -> Option<String> {
    if !ssh::greets(lab.port, Duration::from_secs(5)) {
        return None;
    }
    let (status, id) = ssh::quietly(lab.port, "cat /proc/sys/kernel/random/boot_id", COMMAND)?;
    (status == Some(0)).then_some(id)
}
