//! Memory of a pod without its guest's memory.

use crate::group::Group;
use crate::smaps;
use anyhow::Result;
use std::iter::Sum;

/// Names of the programs that hold a guest's memory, as the kernel truncates them.
const VMMS: [&str; 2] = ["husk-vmm", "qemu-system-x86"];

/// Memory without the guest's, in KiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Overhead {
    /// Resident, program text included.
    pub rss: u64,
    /// Proportional set size: shared pages are divided among the processes.
    pub pss: u64,
    /// Peak memory charged to the cgroup, without page cache.
    pub cgroup: u64,
}

impl Overhead {
    /// Measures all processes in `group`, one of which may have a guest of `guest_mib`.
    pub fn of(group: &Group, guest_mib: u64) -> Result<Self> {
        let (mut overhead, mut guest) = (Self::default(), 0);
        for pid in group.pids()? {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm"))?;
            let holds = VMMS.contains(&name.trim_end());
            let resident = smaps::resident(pid, if holds { guest_mib } else { 0 })?;
            overhead.rss += resident.own_kib;
            overhead.pss += resident.own_pss_kib;
            guest += resident.guest_kib;
        }
        let charged = group.memory()?;
        overhead.cgroup = charged.peak_kib.saturating_sub(charged.cache_kib + guest);
        Ok(overhead)
    }

    /// The values with their names.
    pub fn values(self) -> [(&'static str, u64); 3] {
        [
            ("rss_kib", self.rss),
            ("pss_kib", self.pss),
            ("cgroup_kib", self.cgroup),
        ]
    }
}

impl Sum for Overhead {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            rss: sum.rss + one.rss,
            pss: sum.pss + one.pss,
            cgroup: sum.cgroup + one.cgroup,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_overhead_is_that_of_its_groups() {
        let [a, b] = [1, 10].map(|kib| Overhead {
            rss: kib,
            pss: 2 * kib,
            cgroup: 3 * kib,
        });
        let sum: Overhead = [a, b].into_iter().sum();
        let values = [("rss_kib", 11), ("pss_kib", 22), ("cgroup_kib", 33)];
        assert_eq!(sum.values(), values);
    }
}
