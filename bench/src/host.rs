//! Description of the machine that a benchmark ran on.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The kernel, the processors and the versions of the compared programs.
pub fn facts(husk: &Path) -> Result<BTreeMap<String, Value>> {
    let output = |program: &Path, args: &[&str]| -> Result<String> {
        let output = Command::new(program)
            .args(args)
            .output()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.lines().next().unwrap_or_default().to_owned())
    };
    let cpus = std::fs::read_to_string("/proc/cpuinfo")?;
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let entries = [
        ("host_kernel", json!(output(Path::new("uname"), &["-r"])?)),
        ("host_cpu", json!(model.map(|(_, name)| name))),
        ("host_cpus", json!(std::thread::available_parallelism()?.get())),
        ("husk", json!(output(husk, &["--version"])?)),
    ];
    let mut facts: BTreeMap<_, _> = entries.map(|(name, value)| (name.to_owned(), value)).into();
    // Not every benchmark compares Husk with it.
    if let Ok(version) = output(Path::new("qemu-system-x86_64"), &["--version"]) {
        facts.insert("qemu".to_owned(), json!(version));
    }
    Ok(facts)
}

/// The machine's load average over a minute: other work increases the times, and doubly so in the lab.
pub fn load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}
