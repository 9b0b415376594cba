//! The part of the demonstration that runs where KVM is.

use super::guest::Guest;
use super::show::Message;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant, SystemTime};

/// Parameters of the demonstration.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Manifest of the VM.
    pub manifest: PathBuf,
    /// Root disk; the VM gets a copy.
    pub disk: PathBuf,
}

/// The VM's name in its manifest, and its user.
const NAME: &str = "demo";
const USER: &str = "debian";

/// Time limit until the VM runs; its disk is copied first.
const TO_START: Duration = Duration::from_secs(120);
const TO_END: Duration = Duration::from_secs(120);

/// Commands that show the guest's view of the machine.
const LOOKS: &[(&str, &str)] = &[
    (
        "lscpu",
        r"lscpu | grep -E '^(Architecture|CPU\(s\)|Model name|Thread|Core|Socket|Hypervisor|Virtualization type| +(Model name|Thread|Core|Socket))' | sed 's/: \+/: /'",
    ),
    ("lsblk", "lsblk -o NAME,SIZE,TYPE,RO,FSTYPE,MOUNTPOINTS"),
];

/// Shows the `plan`.
pub fn run(plan: &Plan) -> Result<()> {
    let manifest = std::fs::read_to_string(&plan.manifest)
        .with_context(|| format!("cannot read {}", plan.manifest.display()))?;
    let password = password(&manifest).context("the manifest sets no password")?;
    let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
    Message::Command(format!(
        "husk run {} --volume rootdisk={} --console",
        name(&plan.manifest).unwrap_or_default(),
        name(&plan.disk).unwrap_or_default()
    ))
    .tell();
    let wall = SystemTime::now();
    let mut guest = Guest::start(&plan.manifest, &plan.disk)?;
    let running = starts(&mut guest)?;
    let vm = Inspected::now()?;
    let opening = vm.started.duration_since(wall).unwrap_or_default();
    guest.began += opening;
    moment(
        0.0,
        "VMM started",
        &format!(
            "{}; manifest and disk took {:.1} s",
            vm.what,
            opening.as_secs_f64()
        ),
    );
    moment((running - guest.began).as_secs_f64(), "guest runs", "");
    boots(&mut guest)?;
    Message::Heading(format!("Logged in as {USER} over the serial console")).tell();
    guest.console.log_in(USER, password)?;
    for (shown, command) in LOOKS {
        Message::Command((*shown).to_owned()).tell();
        for line in guest.console.run(command)?.lines() {
            Message::Line(line.to_owned()).tell();
        }
    }
    Message::Command(format!("husk stop {NAME}")).tell();
    let stop = husk(&["stop", NAME])?;
    for line in String::from_utf8_lossy(&stop.stderr).lines() {
        Message::Line(line.to_owned()).tell();
    }
    ensure!(stop.status.success(), "husk stop: {}", stop.status);
    let status = guest.wait(TO_END)?;
    ensure!(
        status.success(),
        "the guest did not power off cleanly: husk run: {status}"
    );
    Message::Guest(running.elapsed().as_secs_f64()).tell();
    vm.nothing_left()?;
    Message::Heading("Nothing is left: no process, no state, and the disk image is as it was".to_owned())
        .tell();
    Ok(())
}

fn moment(seconds: f64, what: &str, more: &str) {
    Message::Moment(seconds, what.to_owned(), more.to_owned()).tell();
}

/// Waits until the guest runs; returns its start time.
fn starts(guest: &mut Guest) -> Result<Instant> {
    let running = guest
        .notes
        .wait_for(&format!("{NAME}: running"), Instant::now() + TO_START);
    running.context("the VM did not start")
}

/// Shows the guest's boot until cloud-init is done and a login is possible.
fn boots(guest: &mut Guest) -> Result<()> {
    for (words, what, program) in [
        ("Linux version ", "kernel", "Linux"),
        ("systemd[1]: systemd ", "init", "systemd"),
    ] {
        let (_, seconds) = guest.until(&[words])?;
        let version = guest.console.rest_of_line()?;
        let version = version.split(' ').next().unwrap_or_default();
        moment(seconds, what, &format!("{program} {version}"));
    }
    // These lines come in any order.
    let mut awaited = vec![
        ("login: ", "login prompt", "on ttyS0"),
        (
            "first boot done",
            "first boot's command",
            "from the manifest's cloud-init data",
        ),
        (" finished at ", "cloud-init done", ""),
    ];
    while !awaited.is_empty() {
        let words: Vec<&str> = awaited.iter().map(|(words, _, _)| *words).collect();
        let (which, seconds) = guest.until(&words)?;
        let (_, what, more) = awaited.remove(which);
        moment(seconds, what, more);
    }
    Ok(())
}

/// Output of `husk inspect` for the VM.
#[derive(Debug)]
struct Inspected {
    what: String,
    started: SystemTime,
    pids: Vec<u64>,
    state: PathBuf,
}

impl Inspected {
    fn now() -> Result<Self> {
        let output = husk(&["inspect", "-o", "json", NAME])?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "husk inspect: {errors}");
        let view: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let started = view["times"]["vmmStarted"].as_str().context("no vmmStarted")?;
        let started: jiff::Timestamp = started.parse()?;
        let mib = view["memoryBytes"].as_u64().unwrap_or_default() >> 20;
        let pids = [&view["monitorPid"], &view["vmmPid"]];
        let socket = view["files"]["socket"].as_str().context("no socket")?;
        Ok(Self {
            what: format!("{} vCPUs, {mib} MiB", view["cpus"]),
            started: started.into(),
            pids: pids.iter().filter_map(|pid| pid.as_u64()).collect(),
            state: PathBuf::from(socket).parent().context("no folder")?.to_owned(),
        })
    }

    /// Checks that the VM has left no files or processes behind.
    fn nothing_left(&self) -> Result<()> {
        let list = husk(&["list", "-o", "name"])?;
        let names = String::from_utf8_lossy(&list.stdout);
        ensure!(
            !names.lines().any(|name| name == NAME),
            "husk list still shows {NAME}"
        );
        ensure!(!self.state.exists(), "{} is left", self.state.display());
        for pid in &self.pids {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            ensure!(!name.starts_with("husk"), "process {pid} is left");
        }
        Ok(())
    }
}

fn husk(arguments: &[&str]) -> Result<Output> {
    Command::new("husk")
        .args(arguments)
        .output()
        .context("cannot start husk")
}

/// The password that cloud-init sets.
fn password(manifest: &str) -> Option<&str> {
    manifest
        .lines()
        .find_map(|line| line.trim().strip_prefix("password:"))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_has_a_password() {
        let path = crate::checkout::root().join("tests/manifests/demo-vm.yaml");
        let manifest = std::fs::read_to_string(path).expect("the manifest");
        assert_eq!(password(&manifest), Some("husk"));
        assert_eq!(password("spec: {}"), None);
    }
}
