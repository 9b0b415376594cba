//! The recorded state of the running lab, and the locks around it.

use crate::checkout;
use anyhow::{Context, Result};
use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{File, TryLockError};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A process, distinguished from a later one with the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Process ID.
    pub pid: i32,
    /// Start time in clock ticks since the machine's boot.
    started: u64,
}

impl Process {
    /// The running process `pid`.
    pub fn running(pid: i32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may hold anything; `state` is field 3, `starttime` field 22.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?;
        let started = fields.nth(18)?.parse().ok()?;
        // The first thread of a killed process may be a zombie while others still hold its files.
        let over = matches!(state, "Z" | "X")
            && std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count) < 2;
        (!over).then_some(Self { pid, started })
    }

    /// User and system time it has used so far.
    pub fn cpu_time(self) -> Option<Duration> {
        if !self.alive() {
            return None;
        }
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok()?;
        // `utime` and `stime` are fields 14 and 15.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
        let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        Some(Duration::from_millis(
            (user + system) * 1000 / clock_ticks_per_second().max(1),
        ))
    }

    /// True if it still runs.
    pub fn alive(self) -> bool {
        Self::running(self.pid) == Some(self)
    }

    /// Sends it `signal` if it still runs.
    pub fn signal(self, signal: Signal) {
        if self.alive()
            && let Some(pid) = Pid::from_raw(self.pid)
        {
            // It may end at this very moment, which is fine.
            let _ = kill_process(pid, signal);
        }
    }

    /// Waits until it has ended; false if it runs on after `limit`.
    pub fn ended_within(self, limit: Duration) -> bool {
        let deadline = std::time::Instant::now() + limit;
        while self.alive() {
            if std::time::Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        true
    }
}

/// Record of a lab that was started.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Lab {
    /// The QEMU process.
    pub qemu: Process,
    /// The file server processes.
    pub servers: Vec<Process>,
    /// SSH port on 127.0.0.1.
    pub port: u16,
    /// Hash of the image that the lab runs.
    pub image: String,
    /// Folder of the sockets.
    pub sockets: PathBuf,
    /// Start time, seconds since 1970.
    pub since: u64,
    /// True once the lab has answered. Until then the command that boots it holds the lock.
    pub booted: bool,
}

impl Lab {
    /// True if all processes of the lab run.
    pub fn alive(&self) -> bool {
        self.qemu.alive() && self.servers.iter().all(|server| server.alive())
    }

    /// Time since the lab was started.
    pub fn uptime(&self) -> Duration {
        let since = SystemTime::UNIX_EPOCH + Duration::from_secs(self.since);
        since.elapsed().unwrap_or_default()
    }
}

/// Labs that can run side by side. Each has a state folder, a lock, an SSH port and a writable share of its own.
pub const LABS: u32 = 2;

/// State folder of one of this checkout's labs. It outlives `cargo clean`.
#[derive(Debug, Clone)]
pub struct LabFolder {
    folder: PathBuf,
    number: u32,
}

impl LabFolder {
    /// Finds or creates the folder of lab `number`, counted from 1.
    pub fn find(number: u32) -> Result<Self> {
        let digest = Sha256::digest(checkout::root().as_os_str().as_bytes());
        let mut name = format!(
            "at-{:02x}{:02x}{:02x}{:02x}",
            digest[0], digest[1], digest[2], digest[3]
        );
        if number > 1 {
            name = format!("{name}-{number}");
        }
        let folder = checkout::folder(checkout::cache()?.join("lab").join(name))?;
        std::fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
        Ok(Self { folder, number })
    }

    /// Number of the lab, from 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Path of the folder, which holds serial.log, qemu.log and the key.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Path of the file `name` in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The lab that was started last, unless it was shut down since.
    pub fn read(&self) -> Option<Lab> {
        serde_json::from_slice(&std::fs::read(self.file("lab.json")).ok()?).ok()
    }

    /// Records `lab`.
    pub fn write(&self, lab: &Lab) -> Result<()> {
        let new = self.file("lab.json.new");
        std::fs::write(&new, serde_json::to_vec_pretty(lab)?)?;
        std::fs::rename(new, self.file("lab.json"))?;
        Ok(())
    }

    /// Records that no lab runs.
    pub fn forget(&self) {
        let _ = std::fs::remove_file(self.file("lab.json"));
    }

    /// Waits for the exclusive lock for booting or shutting down the lab; held until the file is dropped.
    pub fn lock(&self) -> Result<File> {
        checkout::lock(&self.file("lock"), "boots the lab or shuts it down")
    }

    /// Marks the lab as used until the returned file is dropped.
    pub fn enter(&self) -> Result<File> {
        let file = self.open(&format!("users/{}", std::process::id()))?;
        file.lock_shared()?;
        Ok(file)
    }

    /// Number of other commands that use the lab now.
    pub fn users(&self) -> usize {
        let Ok(entries) = std::fs::read_dir(self.file("users")) else {
            return 0;
        };
        let own = std::process::id().to_string();
        entries
            .flatten()
            .filter(|entry| entry.file_name().to_str() != Some(&own))
            .filter(|entry| {
                let Ok(file) = File::open(entry.path()) else {
                    return false;
                };
                let used = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
                if !used {
                    let _ = std::fs::remove_file(entry.path());
                }
                used
            })
            .count()
    }

    fn open(&self, name: &str) -> Result<File> {
        let path = self.file(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let pid = i32::try_from(child.id()).expect("a pid");
        let process = Process::running(pid).expect("runs");
        assert!(process.alive());
        assert!(
            !Process {
                pid,
                started: process.started + 1
            }
            .alive()
        );
        assert!(!process.ended_within(Duration::from_millis(60)));
        child.kill().expect("killed");
        // A zombie counts as ended.
        assert!(process.ended_within(Duration::from_secs(10)));
        child.wait().expect("waited for");
        assert!(!process.alive());
    }
}
