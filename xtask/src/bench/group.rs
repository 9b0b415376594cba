//! A control group around a VMM and all it starts: what it costs, and that nothing is left.

use anyhow::{Context, Result, bail};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// A control group; dropped, all in it is killed.
#[derive(Debug)]
pub struct Group {
    folder: PathBuf,
}

impl Group {
    /// An empty one within this process's own.
    ///
    /// # Errors
    /// If this is not root, or the system has no unified hierarchy of control groups.
    pub fn new() -> Result<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let path = own
            .lines()
            .find_map(|line| line.strip_prefix("0::/"))
            .context("this system has no cgroup v2")?;
        let name = format!("bench-{}", std::process::id());
        let folder = PathBuf::from("/sys/fs/cgroup").join(path).join(name);
        std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self { folder })
    }

    /// Starts `command` in it.
    pub fn hold(&self, command: &mut Command) -> Result<()> {
        let procs = std::fs::File::options()
            .write(true)
            .open(self.folder.join("cgroup.procs"))?;
        // SAFETY: a write to an open file is async-signal-safe and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                nix::unistd::write(procs.as_fd(), b"0")?;
                Ok(())
            });
        }
        Ok(())
    }

    /// Processor time all in it have used, those that have ended too.
    pub fn cpu(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(self.folder.join("cpu.stat"))?;
        let micros = stat
            .lines()
            .find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok())
            .context("cpu.stat has no usage_usec")?;
        Ok(Duration::from_micros(micros))
    }

    /// Processor time that the guests of its processes have used, of those that still run.
    pub fn guest(&self) -> Result<Duration> {
        let mut ticks = 0;
        for pid in self.pids()? {
            // One that has just ended has no guest any more.
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            ticks += guest_ticks(&stat).unwrap_or(0);
        }
        let second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no ticks")?;
        Ok(Duration::from_secs_f64(ticks as f64 / second as f64))
    }

    /// The processes in it.
    pub fn pids(&self) -> Result<Vec<u32>> {
        self.ids("cgroup.procs")
    }

    /// Their threads.
    pub fn threads(&self) -> Result<Vec<u32>> {
        self.ids("cgroup.threads")
    }

    fn ids(&self, file: &str) -> Result<Vec<u32>> {
        let text = std::fs::read_to_string(self.folder.join(file))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// Whether one of its threads has a name that begins like that.
    pub fn has_thread(&self, beginning: &str) -> Result<bool> {
        let named = |thread: &u32| {
            std::fs::read_to_string(format!("/proc/{thread}/comm"))
                .is_ok_and(|comm| comm.starts_with(beginning))
        };
        Ok(self.threads()?.iter().any(named))
    }

    /// The process in it whose program is called `program`.
    pub fn find(&self, program: &str) -> Result<u32> {
        let runs = |pid: &u32| {
            // The confined VMM's own link leads nowhere, its name stays.
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end() == program)
        };
        let found = self.pids()?.into_iter().find(runs);
        found.with_context(|| format!("no process is called {program}"))
    }

    /// Waits until the last process in it has ended.
    pub fn wait_until_empty(&self, deadline: Instant) -> Result<()> {
        while !self.pids()?.is_empty() {
            if Instant::now() >= deadline {
                bail!("processes {:?} do not end", self.pids()?);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Kills all in it.
    pub fn kill(&self) -> Result<()> {
        let mut kill = std::fs::File::options()
            .write(true)
            .open(self.folder.join("cgroup.kill"))?;
        kill.write_all(b"1")?;
        self.wait_until_empty(Instant::now() + Duration::from_secs(10))
    }
}

/// `guest_time` of a line of `/proc/PID/stat`, the 43rd field; the second may have anything in its parentheses.
fn guest_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(40)?.parse().ok()
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.kill();
        let _ = std::fs::remove_dir(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_time_is_found_behind_any_name() {
        let fields: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let stat = format!("7 (a) b (c)) S {}\n", fields.join(" "));
        assert_eq!(guest_ticks(&stat), Some(43));
        assert_eq!(guest_ticks("7 (a) S 1"), None);
        assert_eq!(guest_ticks(""), None);
    }
}
