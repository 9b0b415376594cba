//! Statistics of a cgroup.

use std::fs;
use std::path::Path;

/// Counters of a cgroup's controllers; zero where a controller is missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CgroupStats {
    pub cpu: CpuStats,
    pub memory: MemoryStats,
    /// Number of threads.
    pub pids: u64,
    /// Limit of threads; `None` if unlimited.
    pub pids_limit: Option<u64>,
}

/// CPU time, in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuStats {
    /// User and system time.
    pub usage_usec: u64,
    /// User mode, guest time included.
    pub user_usec: u64,
    pub system_usec: u64,
    /// Periods of the CPU quota.
    pub periods: u64,
    /// Periods in which the quota was used up.
    pub throttled: u64,
    /// Time waited for the next period.
    pub throttled_usec: u64,
}

/// Memory, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// In use, page cache included.
    pub usage: u64,
    /// `None` if unlimited.
    pub limit: Option<u64>,
    /// Highest usage so far; 0 if the kernel does not report it.
    pub peak: u64,
    /// Anonymous memory.
    pub anon: u64,
    pub file: u64,
    pub inactive_file: u64,
    pub active_file: u64,
    pub inactive_anon: u64,
    pub active_anon: u64,
    /// Kernel memory.
    pub kernel: u64,
    pub faults: u64,
    /// Faults that needed I/O.
    pub major_faults: u64,
    pub swap: u64,
    /// Times the limit was reached and nothing could be reclaimed.
    pub oom: u64,
    /// Processes that the OOM killer killed.
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

/// Number in a file; `None` for `max`.
fn number(cgroup: &Path, name: &str) -> Option<u64> {
    fs::read_to_string(cgroup.join(name)).ok()?.trim().parse().ok()
}

/// Number of processes that the OOM killer killed; `None` if the cgroup does not exist.
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
