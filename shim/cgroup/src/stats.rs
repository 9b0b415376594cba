//! How much a cgroup has used.

use std::fs;
use std::path::Path;

/// What a cgroup's controllers count; zero where there is no such controller.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CgroupStats {
    /// Time on processors.
    pub cpu: CpuStats,
    /// Memory.
    pub memory: MemoryStats,
    /// Threads.
    pub pids: u64,
    /// The most threads there may be; none if that is not limited.
    pub pids_limit: Option<u64>,
}

/// Time on processors, in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuStats {
    /// All of it.
    pub usage_usec: u64,
    /// In user mode, and as a guest.
    pub user_usec: u64,
    /// In the kernel.
    pub system_usec: u64,
    /// Periods of the limit.
    pub periods: u64,
    /// Those in which it was reached.
    pub throttled: u64,
    /// How long it was waited for their ends.
    pub throttled_usec: u64,
}

/// Bytes of memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// In use, page cache included.
    pub usage: u64,
    /// The limit; none if there is none.
    pub limit: Option<u64>,
    /// The most there ever was; 0 if the kernel does not tell.
    pub peak: u64,
    /// Of no file.
    pub anon: u64,
    /// Page cache.
    pub file: u64,
    /// Page cache that is hardly used.
    pub inactive_file: u64,
    /// Page cache in use.
    pub active_file: u64,
    /// Memory of no file that is hardly used.
    pub inactive_anon: u64,
    /// Memory of no file in use.
    pub active_anon: u64,
    /// Of the kernel.
    pub kernel: u64,
    /// Page faults.
    pub faults: u64,
    /// Those that had to read.
    pub major_faults: u64,
    /// Swap in use.
    pub swap: u64,
    /// Times the limit was reached and nothing could be freed.
    pub oom: u64,
    /// Processes killed for that.
    pub oom_kills: u64,
}

impl CgroupStats {
    pub(super) fn read(cgroup: &Path) -> CgroupStats {
        let cpu = fs::read_to_string(cgroup.join("cpu.stat")).unwrap_or_default();
        let memory = fs::read_to_string(cgroup.join("memory.stat")).unwrap_or_default();
        let events = fs::read_to_string(cgroup.join("memory.events")).unwrap_or_default();
        let cpu = |key| value(&cpu, key).unwrap_or(0);
        let memory = |key| value(&memory, key).unwrap_or(0);
        let events = |key| value(&events, key).unwrap_or(0);
        CgroupStats {
            cpu: CpuStats {
                usage_usec: cpu("usage_usec"),
                user_usec: cpu("user_usec"),
                system_usec: cpu("system_usec"),
                periods: cpu("nr_periods"),
                throttled: cpu("nr_throttled"),
                throttled_usec: cpu("throttled_usec"),
            },
            memory: MemoryStats {
                usage: number(cgroup, "memory.current").unwrap_or(0),
                limit: number(cgroup, "memory.max"),
                peak: number(cgroup, "memory.peak").unwrap_or(0),
                anon: memory("anon"),
                file: memory("file"),
                inactive_file: memory("inactive_file"),
                active_file: memory("active_file"),
                inactive_anon: memory("inactive_anon"),
                active_anon: memory("active_anon"),
                kernel: memory("kernel"),
                faults: memory("pgfault"),
                major_faults: memory("pgmajfault"),
                swap: number(cgroup, "memory.swap.current").unwrap_or(0),
                oom: events("oom"),
                oom_kills: events("oom_kill"),
            },
            pids: number(cgroup, "pids.current").unwrap_or(0),
            pids_limit: number(cgroup, "pids.max"),
        }
    }
}

/// A file of one number; nothing for `max`.
fn number(cgroup: &Path, name: &str) -> Option<u64> {
    fs::read_to_string(cgroup.join(name)).ok()?.trim().parse().ok()
}

/// How many processes in it the kernel killed for want of memory; nothing if it is not there.
pub(super) fn oom_kills(cgroup: &Path) -> Option<u64> {
    value(
        &fs::read_to_string(cgroup.join("memory.events")).ok()?,
        "oom_kill",
    )
}

fn value(text: &str, key: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(name, _)| *name == key)?.1.trim().parse().ok()
}
