//! Privileges of a process, from `/proc`.

use super::netns::Netns;
use anyhow::{Context, Result, ensure};
use std::collections::HashSet;
use std::fs;

/// Bit of the capability in a capability set.
const CAP_NET_ADMIN: u32 = 12;
/// An empty set of capabilities.
const NO_CAPABILITY: &str = "0000000000000000";

/// Fails unless the process `pid` is confined as a VMM in a pod has to be: as [`confined`] checks, with an empty root,
/// and without open files other than inherited and unnamed ones and its own page map.
pub fn none(pid: i32) -> Result<()> {
    confined(pid)?;
    let root = fs::read_dir(format!("/proc/{pid}/root"))?.flatten().count();
    ensure!(root == 0, "its root has {root} entries");
    for file in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let Ok(target) = fs::read_link(file.path()) else {
            continue;
        };
        let target = target.to_string_lossy().into_owned();
        let nameless = ["socket:", "pipe:", "anon_inode:", "/memfd:"];
        let handed = [
            "/dev/kvm",
            "/dev/net/tun",
            "/dev/vhost-net",
            "/dev/vhost-vsock",
            "/dev/null",
        ];
        ensure!(
            nameless.iter().any(|kind| target.starts_with(kind))
                || handed.contains(&target.as_str())
                || target == format!("/proc/{pid}/pagemap")
                || target.ends_with(" (deleted)")
                || target.contains("/rootfs/boot/"),
            "{} is {target}",
            file.path().display()
        );
    }
    for namespace in ["mnt", "pid", "ipc", "net", "uts"] {
        let of = |who: &str| fs::read_link(format!("/proc/{who}/ns/{namespace}"));
        ensure!(
            of(&pid.to_string())? != of("self")?,
            "it is in this {namespace} namespace"
        );
    }
    Ok(())
}

/// Fails if a thread of the process `pid` runs as root, has a capability or could get one, or has no seccomp filter.
/// Returns the number of threads.
pub fn confined(pid: i32) -> Result<usize> {
    let mut threads = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        // A thread that has ended since.
        let Ok(status) = fs::read_to_string(task.path().join("status")) else {
            continue;
        };
        let thread = field(&status, "Name")?;
        // A kernel thread, which runs no code of the process.
        if thread.starts_with("vhost-") {
            continue;
        }
        for (name, wanted) in [
            ("CapInh", NO_CAPABILITY),
            ("CapPrm", NO_CAPABILITY),
            ("CapEff", NO_CAPABILITY),
            ("CapAmb", NO_CAPABILITY),
            ("NoNewPrivs", "1"),
            // Mode 2 is a filter.
            ("Seccomp", "2"),
        ] {
            let found = field(&status, name)?;
            ensure!(found == wanted, "{name} of thread {thread} is {found}");
        }
        for name in ["Uid", "Gid"] {
            let ids = field(&status, name)?;
            ensure!(
                ids.split_whitespace().all(|id| id != "0"),
                "{name} of thread {thread} is {ids}"
            );
        }
        threads += 1;
    }
    Ok(threads)
}

/// Fails if the process `pid` could change a network: its threads have the capability for it, or it has a netlink
/// socket in one of `namespaces` or in its own.
pub fn cannot_change_networks(pid: i32, namespaces: &[&Netns]) -> Result<()> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        let status = fs::read_to_string(task.path().join("status"))?;
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            ensure!(
                !has(&status, set, CAP_NET_ADMIN)?,
                "CAP_NET_ADMIN is in {set} of {}",
                task.path().display()
            );
        }
    }
    let mut sockets = netlink_sockets(&fs::read_to_string(format!("/proc/{pid}/net/netlink"))?);
    for netns in namespaces {
        let table = netns.command("cat").arg("/proc/self/net/netlink").output()?;
        sockets.extend(netlink_sockets(&String::from_utf8_lossy(&table.stdout)));
    }
    for file in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let Ok(target) = fs::read_link(file.path()) else {
            continue;
        };
        let target = target.to_string_lossy().into_owned();
        ensure!(
            !sockets.contains(&target),
            "{} is a netlink socket",
            file.path().display()
        );
    }
    Ok(())
}

fn has(status: &str, set: &str, bit: u32) -> Result<bool> {
    let bits = u64::from_str_radix(field(status, set)?, 16)?;
    Ok(bits >> bit & 1 == 1)
}

fn field<'s>(status: &'s str, name: &str) -> Result<&'s str> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    Ok(line.with_context(|| format!("no {name}"))?.trim())
}

/// The sockets in a namespace's table, as links of descriptors name them. Their inodes are the last column.
fn netlink_sockets(table: &str) -> HashSet<String> {
    let inodes = table
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().last());
    inodes.map(|inode| format!("socket:[{inode}]")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_is_found_in_its_set() {
        let status = "Name:\tx\nCapInh:\t0000000000000000\nCapEff:\t0000000000001000\n";
        assert!(has(status, "CapEff", CAP_NET_ADMIN).expect("a set"));
        assert!(!has(status, "CapInh", CAP_NET_ADMIN).expect("a set"));
        assert!(has(status, "CapBnd", CAP_NET_ADMIN).is_err());
    }

    #[test]
    fn sockets_are_named_by_inode() {
        let table = "sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode\n000 0 1 0 0 0 0 2 0 4711\n";
        assert!(netlink_sockets(table).contains("socket:[4711]"));
        assert_eq!(netlink_sockets(table).len(), 1);
    }
}
