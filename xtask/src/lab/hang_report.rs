//! What can be learnt from a lab that hangs, before it is ended.

use super::state::{Lab, LabFolder};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// How long QEMU may take for each answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Records the processors' registers and, through an NMI, the kernel's stacks in `hung.log`; its path.
pub fn write(dir: &LabFolder, lab: &Lab) -> Result<PathBuf> {
    let mut report = String::new();
    match ask(lab) {
        Ok(registers) => report.push_str(&registers),
        Err(error) => writeln!(report, "QEMU says nothing: {error:#}")?,
    }
    // The kernel panics on the NMI with the stacks of all processors, and ends.
    lab.qemu.ended_within(PATIENCE);
    let serial = std::fs::read(dir.file("serial.log")).unwrap_or_default();
    report.push_str(&String::from_utf8_lossy(&serial));
    let path = dir.file("hung.log");
    std::fs::write(&path, report)?;
    Ok(path)
}

fn ask(lab: &Lab) -> Result<String> {
    let mut stream = UnixStream::connect(lab.sockets.join("qmp"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut execute = |command: Value| -> Result<Value> {
        writeln!(stream, "{command}")?;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let answer: Value = serde_json::from_str(&line).context("not JSON")?;
            // The greeting and events come between.
            if answer.get("return").is_some() || answer.get("error").is_some() {
                return Ok(answer);
            }
        }
    };
    execute(json!({ "execute": "qmp_capabilities" }))?;
    let mut report = String::new();
    for _ in 0..3 {
        let monitor = json!({ "execute": "human-monitor-command", "arguments": { "command-line": "info registers -a" } });
        report.push_str(execute(monitor)?["return"].as_str().unwrap_or_default());
        std::thread::sleep(Duration::from_millis(200));
    }
    execute(json!({ "execute": "inject-nmi" }))?;
    Ok(report)
}
