//! The limits of a container as files of its cgroup.

use std::fs;
use std::io;
use std::path::Path;

use oci_spec::runtime::{LinuxMemory, LinuxPids, LinuxResources};

use super::CgroupError;

/// Default period of a CPU quota, in microseconds.
pub(super) const PERIOD: u64 = 100_000;

/// Controllers that a container's cgroup may need.
const CONTROLLERS: [&str; 6] = ["cpu", "cpuset", "io", "memory", "pids", "hugetlb"];

/// Enables the available controllers for the children of `cgroup`. Errors are ignored: a cgroup with processes cannot
/// enable controllers, and setting a limit without its controller fails later with an error that names it.
pub(super) fn enable_controllers(cgroup: &Path) {
    let has = fs::read_to_string(cgroup.join("cgroup.controllers")).unwrap_or_default();
    let passed = cgroup.join("cgroup.subtree_control");
    let passes = fs::read_to_string(&passed).unwrap_or_default();
    let has: Vec<&str> = has.split_whitespace().collect();
    let passes: Vec<&str> = passes.split_whitespace().collect();
    for controller in CONTROLLERS {
        if has.contains(&controller) && !passes.contains(&controller) {
            let _ = fs::write(&passed, format!("+{controller}"));
        }
    }
}

pub(super) fn apply(cgroup: &Path, resources: &LinuxResources) -> Result<(), CgroupError> {
    let set = |name: &str, value: String, what, controller| set(cgroup, name, &value, what, controller);
    if let Some(memory) = resources.memory() {
        // Negative means unlimited, zero means unset.
        if let Some(limit) = memory.limit().filter(|limit| *limit != 0) {
            set("memory.max", max(limit), "memory", "memory")?;
        }
        if let Some(swap) = swap_limit(memory) {
            // A kernel without swap accounting has neither the file nor swap to limit.
            let file = cgroup.join("memory.swap.max");
            if file.exists() {
                set("memory.swap.max", max(swap), "swap", "memory")?;
            }
        }
        if let Some(low) = memory.reservation().filter(|low| *low > 0) {
            set("memory.low", low.to_string(), "memory", "memory")?;
        }
    }
    if let Some(cpu) = resources.cpu() {
        if let Some(shares) = cpu.shares().filter(|shares| *shares != 0)
            && cgroup.join("cpu.weight").exists()
        {
            set("cpu.weight", cpu_weight(shares).to_string(), "CPU time", "cpu")?;
        }
        let period = cpu.period().filter(|period| *period != 0).unwrap_or(PERIOD);
        if let Some(quota) = cpu.quota().filter(|quota| *quota != 0) {
            set("cpu.max", format!("{} {period}", max(quota)), "CPU time", "cpu")?;
        }
        for (name, list) in [("cpuset.cpus", cpu.cpus()), ("cpuset.mems", cpu.mems())] {
            if let Some(list) = list.as_ref().filter(|list| !list.is_empty()) {
                set(name, list.clone(), "processors", "cpuset")?;
            }
        }
    }
    if let Some(pids) = resources.pids().as_ref().and_then(pids) {
        set("pids.max", max(pids), "the number of threads", "pids")?;
    }
    for limit in resources.hugepage_limits().iter().flatten() {
        let name = format!("hugetlb.{}.max", limit.page_size());
        if is_controller_file(&name) && (limit.limit() != 0 || cgroup.join(&name).exists()) {
            set(&name, limit.limit().to_string(), "huge pages", "hugetlb")?;
        }
    }
    for (name, value) in resources.unified().iter().flatten() {
        if !is_controller_file(name) {
            return Err(CgroupError::BadFile(name.clone()));
        }
        set(
            name,
            value.clone(),
            "what linux.resources.unified names",
            "matching",
        )?;
    }
    Ok(())
}

pub(super) fn pids(pids: &LinuxPids) -> Option<i64> {
    Some(pids.limit()).filter(|limit| *limit != 0)
}

/// Limit of swap alone, from the OCI limit of memory and swap together, as runc converts it. Negative means unlimited.
pub(super) fn swap_limit(memory: &LinuxMemory) -> Option<i64> {
    let limit = memory.limit().unwrap_or(0);
    match (memory.swap().unwrap_or(0), limit) {
        // Unlimited memory includes swap, unless that has a limit of its own.
        (0, ..0) => Some(limit),
        (0, _) => None,
        (swap, _) if swap < 0 || limit < 0 => Some(swap),
        (_, 0) => None,
        (both, _) => Some(both.saturating_sub(limit).max(0)),
    }
}

fn set(
    cgroup: &Path,
    name: &str,
    value: &str,
    what: &'static str,
    controller: &'static str,
) -> Result<(), CgroupError> {
    let path = cgroup.join(name);
    match fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()))
    {
        // cgroupfs reports a missing file as one that must not be created.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied
            ) =>
        {
            Err(CgroupError::NoController {
                what,
                controller,
                path,
            })
        }
        done => done.map_err(CgroupError::io(&path)),
    }
}

fn max(limit: i64) -> String {
    if limit < 0 {
        "max".to_owned()
    } else {
        limit.to_string()
    }
}

/// Converts `cpu.shares` of version 1 (2 to 262144) to `cpu.weight` of version 2 (1 to 10000).
pub(super) fn cpu_weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
}

/// True for the name of a controller's file. `cgroup.*` files move processes or delegate, and are excluded.
fn is_controller_file(name: &str) -> bool {
    let plain = name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_'));
    plain && name.contains('.') && !name.starts_with('.') && !name.starts_with("cgroup.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_become_weights() {
        assert_eq!(
            [2, 1024, 262_144, 0, u64::MAX].map(cpu_weight),
            [1, 39, 10_000, 1, 10_000]
        );
    }

    #[test]
    fn only_files_of_controllers_are_written() {
        for good in ["memory.high", "hugetlb.2MB.max", "cpu.weight.nice"] {
            assert!(is_controller_file(good), "{good}");
        }
        for bad in [
            "cgroup.procs",
            "../memory.max",
            "a/b.c",
            "memory",
            ".",
            "",
            "x\0.y",
        ] {
            assert!(!is_controller_file(bad), "{bad}");
        }
    }
}
