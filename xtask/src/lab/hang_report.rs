//! A report on a lab that hangs, written before it is ended.

use super::state::{Lab, LabFolder};
use crate::qmp::Qmp;
use anyhow::Result;
use serde_json::json;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

/// Maximum time that the kernel's panic on an NMI may take.
const PANIC_LIMIT: Duration = Duration::from_secs(10);

/// Records the processors' registers and, through an NMI, the kernel's stacks in `hung.log`; returns its path.
pub fn write(dir: &LabFolder, lab: &Lab) -> Result<PathBuf> {
    let mut report = String::new();
    match ask(lab) {
        Ok(registers) => report.push_str(&registers),
        Err(error) => writeln!(report, "QEMU says nothing: {error:#}")?,
    }
    // On the NMI the kernel panics, prints the stacks of all processors, and halts.
    lab.qemu.ended_within(PANIC_LIMIT);
    let serial = std::fs::read(dir.file("serial.log")).unwrap_or_default();
    report.push_str(&String::from_utf8_lossy(&serial));
    let path = dir.file("hung.log");
    std::fs::write(&path, report)?;
    Ok(path)
}

fn ask(lab: &Lab) -> Result<String> {
    let mut qmp = Qmp::connect(&lab.sockets.join("qmp"))?;
    let mut report = String::new();
    for _ in 0..3 {
        let registers = qmp.execute(
            "human-monitor-command",
            json!({ "command-line": "info registers -a" }),
        )?;
        report.push_str(registers.as_str().unwrap_or_default());
        std::thread::sleep(Duration::from_millis(200));
    }
    qmp.execute("inject-nmi", json!({}))?;
    Ok(report)
}
