//! The unit of systemd's that runs containerd.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::containerd::{command, run};
use crate::failure::{self, Failure};

/// The unit where the process's cgroup names none.
const UNIT: &str = "containerd.service";
/// Maximum time for systemd to describe the unit.
const SHOW_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between two looks whether systemd has restarted the unit.
const INTERVAL: Duration = Duration::from_millis(50);

/// Finds the unit of the process. A restart of it must restart that process, and end no pod.
pub(super) fn unit_of(pid: i32) -> Result<String, Failure> {
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let unit = service(&cgroup).unwrap_or(UNIT).to_owned();
    let mut show = command(Path::new("systemctl"));
    show.args(["show", "--property=MainPID,KillMode", &unit]);
    let output = run(show, SHOW_TIMEOUT).map_err(|why| {
        Failure::Runtime(format!(
            "{why}: restart containerd yourself: install without --restart"
        ))
    })?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    check(&unit, pid, &stdout).map(|()| unit)
}

fn check(unit: &str, pid: i32, stdout: &str) -> Result<(), Failure> {
    let value = |name: &str| {
        let line = stdout
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.unwrap_or_default()
    };
    if value("MainPID") != pid.to_string() {
        return Err(Failure::Runtime(format!(
            "containerd (process {pid}) is not the main process of a systemd unit ({unit} is not its own), as in k3s \
             and RKE2: add the handler to that system's own configuration of containerd, as docs/node-installation.md \
             says, and restart it"
        )));
    }
    match value("KillMode") {
        "process" | "none" => Ok(()),
        mode => Err(Failure::Runtime(format!(
            "{unit}: a restart would end the node's pods, because it has KillMode={mode}: set KillMode=process in \
             /etc/systemd/system/{unit}.d/husk.conf"
        ))),
    }
}

/// The service in the lines of a process's cgroups.
fn service(cgroups: &str) -> Option<&str> {
    let paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths
        .flat_map(|path| path.rsplit('/'))
        .find(|part| part.ends_with(".service"))
}

/// Restarts a unit and waits until systemd has done so.
pub(super) fn restart(unit: &str, limit: Duration) -> Result<(), String> {
    let mut restart = command(Path::new("systemctl"));
    restart
        .args(["restart", unit])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let described = |why: &dyn std::fmt::Display| format!("systemctl restart {unit}: {why}");
    let mut child = restart
        .spawn()
        .map_err(|error| described(&failure::chain(&error)))?;
    let deadline = Instant::now() + limit;
    loop {
        match child
            .try_wait()
            .map_err(|error| described(&failure::chain(&error)))?
        {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(described(&status)),
            None if Instant::now() >= deadline => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(described(&format!("not done after {} s", limit.as_secs())));
            }
            None => std::thread::sleep(INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_in_the_cgroup() {
        assert_eq!(
            service("0::/system.slice/containerd.service\n"),
            Some("containerd.service")
        );
        let nested = "12:cpu:/\n0::/../../docker-1.scope/system.slice/ctd.service/supervisor\n";
        assert_eq!(service(nested), Some("ctd.service"));
        assert_eq!(service("0::/user.slice/session-1.scope\n"), None);
    }

    #[test]
    fn a_restart_that_would_end_vms_is_refused() {
        let refused = |stdout: &str| match check("a.service", 12, stdout) {
            Err(Failure::Runtime(text)) => text,
            _ => String::new(),
        };
        assert_eq!(refused("KillMode=process\nMainPID=12\n"), "");
        assert!(refused("KillMode=process\nMainPID=11\n").contains("k3s"));
        assert!(refused("").contains("(a.service is not its own)"));
        assert!(refused("MainPID=12\nKillMode=control-group\n").contains("KillMode=control-group"));
    }
}
