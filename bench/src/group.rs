//! A cgroup around a VMM and its descendants: measures their cost, and that none is left.

use anyhow::{Context, Result, bail};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const HIERARCHY: &str = "/sys/fs/cgroup";
/// Field `guest_time` of `/proc/PID/stat`.
const GUEST_TIME: usize = 43;
/// Number of the next cgroup of this process.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// Memory that the memory controller has charged to a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChargedMemory {
    /// Peak, KiB.
    pub peak_kib: u64,
    /// Current page cache, KiB.
    pub cache_kib: u64,
}

/// A cgroup, whose processes are killed when this is dropped.
#[derive(Debug)]
pub struct Group {
    folder: PathBuf,
}

impl Group {
    /// Creates an empty cgroup within this process's own.
    ///
    /// # Errors
    /// If this process is not root, or the system has no cgroup v2 hierarchy.
    pub fn new() -> Result<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let path = own
            .lines()
            .find_map(|line| line.strip_prefix("0::/"))
            .context("this system has no cgroup v2")?;
        let name = format!(
            "bench-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let folder = Path::new(HIERARCHY).join(path).join(name);
        std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self { folder })
    }

    /// Creates an empty cgroup at `path` below the hierarchy's root, with the memory controller.
    ///
    /// # Errors
    /// If this process is not root, or the system has no memory controller.
    pub fn counted(path: &str) -> Result<Self> {
        let group = Self::at(path);
        let parents = group.folder.ancestors().skip(1);
        let parents: Vec<&Path> = parents.take_while(|above| above.starts_with(HIERARCHY)).collect();
        for parent in parents.into_iter().rev() {
            std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
            let passed_on = parent.join("cgroup.subtree_control");
            std::fs::write(&passed_on, "+memory")
                .with_context(|| format!("cannot write {}", passed_on.display()))?;
        }
        let folder = &group.folder;
        std::fs::create_dir(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(group)
    }

    /// The cgroup at `path` below the hierarchy's root, which another program creates and removes.
    pub fn at(path: &str) -> Self {
        Self {
            folder: Path::new(HIERARCHY).join(path),
        }
    }

    /// True if the cgroup exists.
    pub fn exists(&self) -> bool {
        self.folder.is_dir()
    }

    /// Path of the cgroup.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Starts `command` in the cgroup.
    pub fn hold(&self, command: &mut Command) -> Result<()> {
        let procs = std::fs::File::options()
            .write(true)
            .open(self.folder.join("cgroup.procs"))?;
        // SAFETY: a write to an open file is async-signal-safe and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                rustix::io::write(&procs, b"0")?;
                Ok(())
            });
        }
        Ok(())
    }

    /// CPU time that all processes in the cgroup have used, including those that have ended.
    pub fn cpu(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(self.folder.join("cpu.stat"))?;
        let micros = stat
            .lines()
            .find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok())
            .context("cpu.stat has no usage_usec")?;
        Ok(Duration::from_micros(micros))
    }

    /// Memory charged to the cgroup.
    pub fn memory(&self) -> Result<ChargedMemory> {
        let read = |file: &str| {
            let path = self.folder.join(file);
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        let peak: u64 = read("memory.peak")?.trim().parse()?;
        let cache = page_cache(&read("memory.stat")?).context("memory.stat has no file")?;
        Ok(ChargedMemory {
            peak_kib: peak / 1024,
            cache_kib: cache / 1024,
        })
    }

    /// CPU time that the guests of running processes have used.
    pub fn guest(&self) -> Result<Duration> {
        let mut ticks = 0;
        for pid in self.pids()? {
            // A process that has just ended has no guest any more.
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            ticks += stat_field(&stat, GUEST_TIME).unwrap_or(0);
        }
        let second = rustix::param::clock_ticks_per_second();
        Ok(Duration::from_secs_f64(ticks as f64 / second as f64))
    }

    /// The processes in the cgroup.
    pub fn pids(&self) -> Result<Vec<u32>> {
        self.ids("cgroup.procs")
    }

    /// The threads in the cgroup.
    pub fn threads(&self) -> Result<Vec<u32>> {
        self.ids("cgroup.threads")
    }

    fn ids(&self, file: &str) -> Result<Vec<u32>> {
        let text = std::fs::read_to_string(self.folder.join(file))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// True if the name of one of the threads starts with `beginning`.
    pub fn has_thread(&self, beginning: &str) -> Result<bool> {
        let named = |thread: &u32| {
            std::fs::read_to_string(format!("/proc/{thread}/comm"))
                .is_ok_and(|comm| comm.starts_with(beginning))
        };
        Ok(self.threads()?.iter().any(named))
    }

    /// The process in the cgroup whose program is called `program`.
    pub fn find(&self, program: &str) -> Result<u32> {
        let runs = |pid: &u32| {
            // The exe link of the confined VMM does not resolve, but its name remains.
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end() == program)
        };
        let found = self.pids()?.into_iter().find(runs);
        found.with_context(|| format!("no process is called {program}"))
    }

    /// Waits until the last process in the cgroup has ended.
    pub fn wait_until_empty(&self, deadline: Instant) -> Result<()> {
        while !self.pids()?.is_empty() {
            if Instant::now() >= deadline {
                bail!("processes {:?} do not end", self.pids()?);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Kills all processes in the cgroup.
    pub fn kill(&self) -> Result<()> {
        let mut kill = std::fs::File::options()
            .write(true)
            .open(self.folder.join("cgroup.kill"))?;
        kill.write_all(b"1")?;
        self.wait_until_empty(Instant::now() + Duration::from_secs(10))
    }
}

/// Bytes of `memory.stat` that can be reclaimed because a file backs them; those of tmpfs and memfd cannot.
fn page_cache(stat: &str) -> Option<u64> {
    let field = |name: &str| -> Option<u64> {
        stat.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    field("file")?.checked_sub(field("shmem")?)
}

/// A field of a line of `/proc/PID/stat`, from 3. Field 2 may have any characters in its parentheses.
pub fn stat_field(stat: &str, field: usize) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(field - 3)?.parse().ok()
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
    fn a_field_is_found_behind_any_name() {
        let fields: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let stat = format!("7 (a) b (c)) S {}\n", fields.join(" "));
        assert_eq!(
            [22, 43].map(|field| stat_field(&stat, field)),
            [Some(22), Some(43)]
        );
        assert_eq!(stat_field("7 (a) S 1", 22), None);
        assert_eq!(stat_field("7 (a) S 1", 43), None);
        assert_eq!(stat_field("", 43), None);
    }

    #[test]
    fn memory_of_tmpfs_is_no_page_cache() {
        let stat = "anon 7\nfile 300\nkernel 5\nshmem 100\nfile_mapped 9\n";
        assert_eq!(page_cache(stat), Some(200));
        assert_eq!(page_cache("anon 7\n"), None);
    }
}
