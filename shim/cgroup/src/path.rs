//! Parses `linux.cgroupsPath` and finds the cgroup2 mount.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::CgroupError;
use super::scope::Scope;

/// Parsed `linux.cgroupsPath`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CgroupsPath {
    /// Path below the root of the hierarchy: `/kubepods/pod1/0123`.
    Path(PathBuf),
    /// systemd scope: `kubepods-pod1.slice:cri-containerd:0123`.
    Scope(Scope),
}

/// The two forms do not overlap: container runtimes use no colon in a path.
pub(super) fn parse(text: &str) -> Result<CgroupsPath, CgroupError> {
    if text.contains(".slice:") || (text.contains(':') && !text.starts_with('/')) {
        return Scope::parse(text).map(CgroupsPath::Scope);
    }
    let mut path = PathBuf::new();
    for component in Path::new(text).components() {
        match component {
            Component::Normal(part) => path.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return Err(CgroupError::BadPath(text.to_owned())),
        }
    }
    match path.as_os_str().is_empty() {
        true => Err(CgroupError::BadPath(text.to_owned())),
        false => Ok(CgroupsPath::Path(path)),
    }
}

/// Mount point of the cgroup2 file system.
///
/// # Errors
/// No cgroup2 file system is mounted.
pub fn hierarchy() -> Result<PathBuf, CgroupError> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mount_point(&mounts).ok_or(CgroupError::NoHierarchy)
}

fn mount_point(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let cgroup2 = file_system.split(' ').next() == Some("cgroup2");
        cgroup2.then(|| mount.split(' ').nth(4).map(PathBuf::from))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_in_the_hierarchy() {
        let path = PathBuf::from("kubepods/burstable/podx/0123");
        assert_eq!(
            parse("/kubepods/burstable/podx/0123").unwrap(),
            CgroupsPath::Path(path)
        );
        for bad in ["", "/", "../x", "/a/../../x"] {
            assert!(matches!(parse(bad), Err(CgroupError::BadPath(_))), "{bad}");
        }
    }

    #[test]
    fn names_with_colons_are_scopes() {
        assert!(matches!(
            parse("kubepods-pod1.slice:cri-containerd:0123").unwrap(),
            CgroupsPath::Scope(_)
        ));
        for bad in [":a:b", "kubepods:a:b", "/kubepods.slice:a:b", "kubepods.slice:a"] {
            assert!(matches!(parse(bad), Err(CgroupError::BadScope { .. })), "{bad}");
        }
        assert!(matches!(parse("/kubepods/a:b").unwrap(), CgroupsPath::Path(_)));
    }

    #[test]
    fn the_hierarchy_is_found_where_both_versions_are() {
        let text = "31 25 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
                    32 31 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                    33 31 0:29 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(text).unwrap(), Path::new("/sys/fs/cgroup/unified"));
        assert_eq!(mount_point("31 25 0:27 / / rw - ext4 /dev/vda rw"), None);
    }
}
