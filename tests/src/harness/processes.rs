//! The descendants of this process.

use super::poll;
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};
use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

/// A process, from `/proc`.
#[derive(Debug, Clone)]
pub struct Process {
    /// Process ID.
    pub pid: i32,
    parent: i32,
    state: char,
    /// Command line, with words separated by spaces; the short name if there is none.
    pub command: String,
}

impl Process {
    /// Reads the process; nothing if it does not exist.
    pub fn read(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (head, tail) = stat.rsplit_once(')')?;
        let mut fields = tail.split_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words)
            .trim_end_matches('\0')
            .replace('\0', " ");
        let name = head.split_once('(').map_or(head, |(_, name)| name);
        Some(Self {
            pid,
            parent,
            state,
            command: if words.is_empty() {
                format!("[{name}]")
            } else {
                words
            },
        })
    }

    /// True if the process still runs and is not a zombie.
    pub fn runs(&self) -> bool {
        self.state != 'Z'
    }
}

/// The processes that descend from this one, parents first. After [`adopt_orphans`] this includes processes whose
/// parent died.
pub fn descendants() -> Vec<Process> {
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let process = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
            .and_then(Process::read);
        if let Some(process) = process {
            children.entry(process.parent).or_default().push(process);
        }
    }
    let mut found = children.remove(&getpid().as_raw_pid()).unwrap_or_default();
    let mut next = 0;
    while let Some(process) = found.get(next) {
        let more = children.remove(&process.pid).unwrap_or_default();
        found.extend(more);
        next += 1;
    }
    found
}

/// Makes this process the subreaper: orphaned descendants become its children.
pub fn adopt_orphans() -> Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// Waits up to `limit` until no descendant runs, and reaps adopted ones; returns those that still run.
///
/// No [`std::process::Child`] of this process may be unwaited meanwhile.
pub fn wait_for_none(limit: Duration) -> Vec<Process> {
    let deadline = Instant::now() + limit;
    loop {
        while wait(WaitOptions::NOHANG).is_ok_and(|ended| ended.is_some()) {}
        let left: Vec<Process> = descendants().into_iter().filter(Process::runs).collect();
        if left.is_empty() || Instant::now() >= deadline {
            return left;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until a process has ended.
///
/// # Errors
/// With its command line, if it still runs after `limit`.
pub fn gone(pid: i32, limit: Duration) -> Result<()> {
    poll(limit, Duration::from_millis(50), || {
        let running = Process::read(pid).filter(Process::runs);
        Ok(running.map_or(Ok(()), |process| {
            let (seconds, command) = (limit.as_secs(), process.command);
            Err(format!("{pid} still runs after {seconds} s: {command}"))
        }))
    })
}

/// Sends a signal to a process.
pub fn kill(pid: i32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(pid).context("process 0")?;
    Ok(kill_process(pid, signal)?)
}

/// Kills every descendant, and processes that they start meanwhile.
pub fn kill_all() {
    for _ in 0..100 {
        let running: Vec<Process> = descendants().into_iter().filter(Process::runs).collect();
        if running.is_empty() {
            return;
        }
        for process in running {
            // It fails only if the process has ended.
            let _ = kill(process.pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn descendants_are_found_by_their_parents() {
        let mut child = Command::new("sh")
            .args(["-c", "sleep 60 & wait"])
            .spawn()
            .expect("sh");
        let pid = i32::try_from(child.id()).expect("a pid");
        let deadline = Instant::now() + Duration::from_secs(10);
        let found = loop {
            let found = descendants();
            // The fork of a shell comes first, and during its exec it has no arguments.
            let is_there = |process: &Process| process.parent == pid && process.command == "sleep 60";
            if found.iter().any(is_there) || Instant::now() > deadline {
                break found;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let sleep = found.iter().find(|process| process.parent == pid).expect("sleep");
        assert_eq!(sleep.command, "sleep 60");
        let _ = kill(sleep.pid, Signal::KILL);
        let _ = child.kill();
        let _ = child.wait();
        assert!(Process::read(pid).is_none_or(|process| !process.runs()));
    }
}
