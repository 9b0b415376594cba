//! Where the cgroup of a container is.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::CgroupError;
use super::scope::Scope;

/// What `linux.cgroupsPath` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CgroupsPath {
    /// A path below the hierarchy's root: `/kubepods/pod1/0123`.
    Path(PathBuf),
    /// A scope, which is systemd's to make: `kubepods-pod1.slice:cri-containerd:0123`.
    Scope(Scope),
}

/// The two forms do not overlap: no path of a container runtime's has a colon.
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

/// Where the cgroup2 file system is mounted.
///
/// # Errors
/// Nowhere.
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
    fn what_has_colons_is_systemds() {
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
