//! Checks of the host other than KVM: runtime directory, network, cgroups, memory, isolation, io_uring.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use husk_monitor::state::{RuntimeDir, StateError};
use rustix::fs::statfs;
use rustix::io::Errno;
use rustix::io_uring::{io_uring_params, io_uring_setup};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::check::{Check, Severity};
use crate::failure::{chain, one_line};
use crate::output;

/// Runs all checks of this module.
pub(super) fn checks() -> Vec<Check> {
    vec![
        runtime_directory(RuntimeDir::locate()),
        device("tun", "/dev/net/tun", "modprobe tun", "VMs get no network"),
        device(
            "vhost-net",
            "/dev/vhost-net",
            "modprobe vhost_net",
            "networking is slower",
        ),
        cgroup(),
        transparent_huge_pages(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
        huge_page_pools(Path::new("/sys/kernel/mm/hugepages")),
        iommu(Path::new("/sys/kernel/iommu_groups")),
        io_uring(try_io_uring(), &read("/proc/sys/kernel/io_uring_disabled")),
        user_namespaces(try_user_namespace()),
    ]
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Checks the directory for the state of this user's VMs. A user without a login session has none.
fn runtime_directory(located: Result<RuntimeDir, StateError>) -> Check {
    let (name, title) = ("runtime-directory", "runtime directory");
    match located {
        Ok(runtime) => Check::present(
            name,
            title,
            Severity::Required,
            one_line(&runtime.path().to_string_lossy()),
        ),
        Err(StateError::Nowhere) => Check::missing(
            name,
            title,
            Severity::Required,
            "no directory for the state of VMs",
            Some("log in directly (not with su), or set XDG_RUNTIME_DIR to a directory you own".into()),
        ),
        Err(error) => {
            let detail = match &error {
                StateError::Unfit { place, why } => one_line(&format!("{place} {why}")),
                error => chain(error),
            };
            let fix =
                "set HUSK_RUNTIME_DIR to an absolute path of a directory you own, empty or not yet existing";
            Check::missing(name, title, Severity::Required, detail, Some(fix.into()))
        }
    }
}

/// Checks a character device by opening it, which also loads its module if possible.
fn device(name: &'static str, path: &'static str, load: &str, without: &str) -> Check {
    match fs::File::options().read(true).write(true).open(path) {
        Ok(_) => Check::present(name, path, Severity::Optional, "usable"),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Check::missing(
            name,
            path,
            Severity::Optional,
            format!("permission denied: {without}"),
            Some("run as root".into()),
        ),
        Err(error) => {
            let found = if error.kind() == ErrorKind::NotFound {
                "no such device".into()
            } else {
                chain(&error)
            };
            Check::missing(
                name,
                path,
                Severity::Optional,
                format!("{found}: {without}"),
                Some(load.into()),
            )
        }
    }
}

fn cgroup() -> Check {
    let (name, title) = ("cgroup-v2", "cgroup v2");
    let fix = "boot with systemd.unified_cgroup_hierarchy=1";
    let is_v2 = |path: &str| statfs(path).is_ok_and(|stat| stat.f_type == libc::CGROUP2_SUPER_MAGIC);
    let missing = |detail| Check::missing(name, title, Severity::Optional, detail, Some(fix.into()));
    if is_v2("/sys/fs/cgroup") {
        let controllers = read("/sys/fs/cgroup/cgroup.controllers").replace(' ', ", ");
        Check::present(name, title, Severity::Optional, controllers)
    } else if is_v2("/sys/fs/cgroup/unified") {
        missing("hybrid: pods whose limits need a version 1 controller cannot start")
    } else {
        missing("not mounted: pods cannot start")
    }
}

fn transparent_huge_pages(enabled: &str) -> Check {
    let (name, title) = ("transparent-huge-pages", "transparent huge pages");
    match bracketed(enabled) {
        Some(mode @ ("always" | "madvise")) => Check::present(name, title, Severity::Optional, mode),
        mode => Check::missing(
            name,
            title,
            Severity::Optional,
            format!("{}: guest memory is slower", mode.unwrap_or("not in this kernel")),
            Some("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled".into()),
        ),
    }
}

/// The selected word of a sysfs file like `one [two] three`.
fn bracketed(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

fn huge_page_pools(root: &Path) -> Check {
    let (name, title) = ("huge-pages", "huge page pools");
    let mut pools = Vec::new();
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let directory = entry.file_name();
        let size = directory.to_string_lossy();
        let Some(kib) = size
            .strip_prefix("hugepages-")
            .and_then(|size| size.strip_suffix("kB"))
            .and_then(|kib| kib.parse::<u64>().ok())
        else {
            continue;
        };
        let count = |file| {
            read(&entry.path().join(file).to_string_lossy())
                .parse::<u64>()
                .unwrap_or(0)
        };
        let total = count("nr_hugepages");
        if total > 0 {
            pools.push((
                kib,
                format!(
                    "{} of {total} pages of {} free",
                    count("free_hugepages"),
                    output::bytes(kib << 10)
                ),
            ));
        }
    }
    pools.sort();
    if pools.is_empty() {
        Check::missing(
            name,
            title,
            Severity::Optional,
            "none reserved: manifests with memory.hugepages cannot start",
            Some("sysctl vm.nr_hugepages=512 (1 GiB in pages of 2Mi)".into()),
        )
    } else {
        let pools: Vec<_> = pools.into_iter().map(|(_, text)| text).collect();
        Check::present(name, title, Severity::Optional, pools.join(", "))
    }
}

fn iommu(groups: &Path) -> Check {
    let (name, title) = ("iommu", "IOMMU");
    match fs::read_dir(groups).map_or(0, Iterator::count) {
        0 => Check::missing(
            name,
            title,
            Severity::Optional,
            "no IOMMU groups; not used by Husk yet",
            Some("enable VT-d or AMD-Vi in the firmware; on Intel boot with intel_iommu=on".into()),
        ),
        count => Check::present(name, title, Severity::Optional, format!("{count} groups")),
    }
}

fn io_uring(attempt: rustix::io::Result<()>, disabled: &str) -> Check {
    let (name, title) = ("io-uring", "io_uring");
    let missing = |found: &str, fix: &str| {
        let detail = format!("{found}: disks are served by threads instead");
        Check::missing(name, title, Severity::Optional, detail, Some(fix.into()))
    };
    match attempt {
        Ok(()) if matches!(disabled, "" | "0") => Check::present(name, title, Severity::Optional, "allowed"),
        Ok(()) => missing(
            "only for privileged processes",
            "sysctl kernel.io_uring_disabled=0",
        ),
        Err(Errno::NOSYS) => missing("not in this kernel", "use a kernel with CONFIG_IO_URING"),
        Err(_) if !matches!(disabled, "" | "0") => missing("disabled", "sysctl kernel.io_uring_disabled=0"),
        Err(error) => missing(
            &chain(&error),
            "allow io_uring_setup in the container's seccomp profile",
        ),
    }
}

/// Creates a ring of one entry and closes it.
fn try_io_uring() -> rustix::io::Result<()> {
    // SAFETY: no memory or descriptor is given to the ring.
    unsafe { io_uring_setup(1, &mut io_uring_params::default()) }.map(drop)
}

fn user_namespaces(attempt: io::Result<()>) -> Check {
    let (name, title) = ("user-namespaces", "user namespaces");
    let knobs = [
        (
            "kernel.unprivileged_userns_clone",
            "/proc/sys/kernel/unprivileged_userns_clone",
            "0",
            "1",
        ),
        (
            "user.max_user_namespaces",
            "/proc/sys/user/max_user_namespaces",
            "0",
            "15000",
        ),
        (
            "kernel.apparmor_restrict_unprivileged_userns",
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "0",
        ),
    ];
    let closed = knobs.iter().find(|(_, path, off, _)| read(path) == *off);
    let (found, fix) = match (closed, attempt) {
        (None, Ok(())) => return Check::present(name, title, Severity::Optional, "allowed"),
        (Some((sysctl, _, off, on)), _) => (format!("{sysctl} is {off}"), format!("sysctl {sysctl}={on}")),
        (None, Err(error)) => (
            chain(&error),
            "allow unshare(CLONE_NEWUSER) in the container's seccomp profile".into(),
        ),
    };
    let detail = format!("{found}: VMs of users other than root run with less isolation");
    Check::missing(name, title, Severity::Optional, detail, Some(fix))
}

/// Creates a user and a mount namespace in a child process.
fn try_user_namespace() -> io::Result<()> {
    let mut child = Command::new("/proc/self/exe");
    child
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe {
        child.pre_exec(|| Ok(unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS)?));
    }
    child.status().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::CheckStatus;

    #[test]
    fn the_bracketed_word_is_the_mode() {
        assert_eq!(bracketed("always [madvise] never"), Some("madvise"));
        assert_eq!(bracketed("always"), None);
        assert_eq!(
            transparent_huge_pages("always madvise [never]").status,
            CheckStatus::Missing
        );
        assert_eq!(transparent_huge_pages("[always] madvise never").detail, "always");
    }

    #[test]
    fn pools_are_listed_smallest_first() {
        let root = tempfile::tempdir().unwrap();
        for (name, total, free) in [
            ("hugepages-1048576kB", "2", "1"),
            ("hugepages-2048kB", "512", "500"),
            ("hugepages-64kB", "0", "0"),
        ] {
            fs::create_dir(root.path().join(name)).unwrap();
            fs::write(root.path().join(name).join("nr_hugepages"), format!("{total}\n")).unwrap();
            fs::write(root.path().join(name).join("free_hugepages"), format!("{free}\n")).unwrap();
        }
        let check = huge_page_pools(root.path());
        assert_eq!(check.status, CheckStatus::Present);
        assert_eq!(
            check.detail,
            "500 of 512 pages of 2Mi free, 1 of 2 pages of 1Gi free"
        );
    }

    #[test]
    fn no_pool_and_no_iommu_is_missing_with_a_fix() {
        let root = tempfile::tempdir().unwrap();
        for check in [huge_page_pools(root.path()), iommu(&root.path().join("absent"))] {
            assert_eq!(check.status, CheckStatus::Missing);
            assert!(check.fix.is_some());
            assert!(!check.blocks());
        }
    }

    #[test]
    fn io_uring_distinguishes_sysctl_and_seccomp() {
        assert_eq!(io_uring(Ok(()), "0").status, CheckStatus::Present);
        assert_eq!(io_uring(Ok(()), "").status, CheckStatus::Present);
        assert!(
            io_uring(Ok(()), "1")
                .detail
                .starts_with("only for privileged processes")
        );
        assert!(io_uring(Err(Errno::PERM), "2").detail.starts_with("disabled"));
        assert!(io_uring(Err(Errno::PERM), "0").fix.unwrap().contains("seccomp"));
    }

    #[test]
    fn a_user_needs_a_runtime_directory() {
        assert!(runtime_directory(Err(StateError::Nowhere)).blocks());
        let unfit = StateError::Unfit {
            place: "HUSK_RUNTIME_DIR=run".into(),
            why: "is a relative path".into(),
        };
        let check = runtime_directory(Err(unfit));
        assert_eq!(check.detail, "HUSK_RUNTIME_DIR=run is a relative path");
        let check = runtime_directory(Ok(RuntimeDir::at("/run/husk")));
        assert_eq!(
            (check.status, check.detail.as_str()),
            (CheckStatus::Present, "/run/husk")
        );
    }

    #[test]
    fn a_missing_device_has_a_fix() {
        let check = device("x", "/dev/husk-does-not-exist", "modprobe x", "nothing works");
        assert_eq!(check.detail, "no such device: nothing works");
        assert_eq!(check.fix.as_deref(), Some("modprobe x"));
    }
}
