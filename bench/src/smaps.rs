//! Memory of a VMM without its guest's memory.

use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;

/// A process's resident memory without the guest's.
#[derive(Debug, PartialEq, Eq)]
pub struct Resident {
    /// Resident set size, KiB.
    pub own_kib: u64,
    /// Proportional set size: shared pages are divided among the processes, KiB.
    pub own_pss_kib: u64,
    /// Memory of the guest, KiB.
    pub guest_kib: u64,
    /// By name of the mapping, KiB: a file's name, `[heap]`, `[stack]` or `anonymous`.
    pub parts: BTreeMap<String, u64>,
}

/// Reads `/proc/PID/smaps` of a VMM whose guest has `guest_mib` of memory; 0 for a process without a guest.
pub fn resident(pid: u32, guest_mib: u64) -> Result<Resident> {
    let path = format!("/proc/{pid}/smaps");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    parse(&text, guest_mib * 1024)
}

/// KiB of memory that would be free without the process: private dirty pages and anonymous ones. Both fields count the
/// private anonymous pages, which are always dirty, so the larger one has all.
pub fn unshared(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    larger(&text).with_context(|| format!("{path} lacks a field"))
}

fn larger(rollup: &str) -> Option<u64> {
    let of = |name| rollup.lines().find_map(|line| field(line, name));
    Some(of("Private_Dirty:")?.max(of("Anonymous:")?))
}

/// Guest memory is any mapping of no file that has at least a quarter of its size and was written to.
fn parse(smaps: &str, guest_kib: u64) -> Result<Resident> {
    let mut parts = BTreeMap::new();
    let (mut guest, mut guest_rss, mut own_pss) = (0, 0, 0);
    let (mut name, mut size, mut guests, mut of_file) = (String::new(), 0, false, false);
    for line in smaps.lines() {
        if let Some(value) = field(line, "Size:") {
            size = value;
        } else if let Some(rss) = field(line, "Rss:") {
            guests = guest_kib > 0 && !of_file && size >= guest_kib / 4 && rss > 1024;
            if guests {
                guest += size;
                guest_rss += rss;
            } else {
                *parts.entry(name.clone()).or_insert(0) += rss;
            }
        } else if let Some(pss) = field(line, "Pss:") {
            if !guests {
                own_pss += pss;
            }
        } else if line
            .split_whitespace()
            .next()
            .is_some_and(|word| word.contains('-'))
        {
            name = label(line);
            of_file = is_file(line);
        }
    }
    // The heuristic must not silently count the wrong mapping.
    ensure!(
        guest_kib == 0 || (guest_kib..=guest_kib + guest_kib / 64).contains(&guest),
        "{guest} KiB look like guest memory, not {guest_kib}"
    );
    parts.retain(|_, kib| *kib > 0);
    Ok(Resident {
        own_kib: parts.values().sum(),
        own_pss_kib: own_pss,
        guest_kib: guest_rss,
        parts,
    })
}

fn field(line: &str, name: &str) -> Option<u64> {
    line.strip_prefix(name)?
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse()
        .ok()
}

/// True if a mapping with this first line is of a file with a name, and not of memory that has a descriptor.
fn is_file(line: &str) -> bool {
    path(line).starts_with('/') && !path(line).starts_with("/memfd:")
}

/// A mapping's name, from its first line.
fn label(line: &str) -> String {
    match path(line).rsplit('/').next() {
        None | Some("") => "anonymous".to_owned(),
        Some(name) => name.trim_end_matches(" (deleted)").to_owned(),
    }
}

/// The last part of a mapping's first line: `START-END PERMS OFFSET DEVICE INODE  NAME`.
fn path(line: &str) -> &str {
    let mut rest = line;
    for _ in 0..5 {
        rest = rest.trim_start();
        rest = rest.find(' ').map_or("", |end| &rest[end..]);
    }
    rest.trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0a00000-55d0c0c00000 r-xp 00000000 fd:01 1234                       /usr/bin/a vmm
Size:               2048 kB
KernelPageSize:        4 kB
Rss:                1500 kB
Pss:                 500 kB
7f0000000000-7f0010000000 rw-p 00000000 00:00 0 
Size:             262144 kB
Rss:               40000 kB
Pss:               40000 kB
7f0018000000-7f001c000000 rw-p 00000000 fd:01 77                         /boot/vmlinux
Size:              65536 kB
Rss:                2000 kB
Pss:                2000 kB
7f0020000000-7f0024000000 ---p 00000000 00:00 0 
Size:              65536 kB
Rss:                   0 kB
7f0030000000-7f0030100000 rw-p 00000000 00:00 0                          [heap]
Size:               1024 kB
Rss:                 300 kB
Pss:                 300 kB
";

    #[test]
    fn guest_memory_is_left_out() {
        let resident = parse(SMAPS, 262_144).expect("parsed");
        assert_eq!(resident.own_kib, 3800);
        assert_eq!((resident.own_pss_kib, resident.guest_kib), (2800, 40_000));
        assert_eq!(resident.parts["a vmm"], 1500);
        assert_eq!(resident.parts["[heap]"], 300);
        assert_eq!(resident.parts["vmlinux"], 2000);
        assert_eq!(resident.parts.len(), 3);
    }

    #[test]
    fn guest_memory_may_have_a_descriptor() {
        let smaps = SMAPS.replace(
            "00000000 00:00 0 \nSize:             262144",
            "00000000 00:01 9  /memfd:ram (deleted)\nSize:             262144",
        );
        assert!(smaps.contains("/memfd:ram"));
        assert_eq!(parse(&smaps, 262_144).expect("parsed").guest_kib, 40_000);
    }

    #[test]
    fn unshared_memory_is_counted_once() {
        let rollup = |dirty: u64, anonymous: u64| {
            format!(
                "5500-7fff ---p 00000000 00:00 0  [rollup]\nRss: 900 kB\nPrivate_Dirty:  {dirty} kB\nAnonymous: {anonymous} kB\n"
            )
        };
        assert_eq!(larger(&rollup(500, 400)), Some(500));
        assert_eq!(larger(&rollup(400, 500)), Some(500));
        assert_eq!(larger("Private_Dirty: 4 kB\n"), None);
    }

    #[test]
    fn guest_memory_that_is_not_found_is_an_error() {
        assert!(parse(SMAPS, 524_288).is_err());
        assert_eq!(parse(SMAPS, 0).expect("parsed").own_kib, 43_800);
    }
}
