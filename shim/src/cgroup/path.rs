//! Where the cgroup of a container is.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::CgroupError;

/// The path below the hierarchy's root that `linux.cgroupsPath` names: `/kubepods/pod1/0123`.
///
/// # Errors
/// It leads out of the hierarchy, or to its root; or it is a scope of systemd's, which alone may make those.
pub fn relative(text: &str) -> Result<PathBuf, CgroupError> {
    if text.contains(".slice:") {
        return Err(CgroupError::Systemd(text.to_owned()));
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
        false => Ok(path),
    }
}

/// Where the cgroup2 file system is mounted.
///
/// # Errors
/// Nowhere.
pub fn hierarchy() -> Result<PathBuf, CgroupError> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounted(&mounts).ok_or(CgroupError::NoHierarchy)
}

fn mounted(mountinfo: &str) -> Option<PathBuf> {
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
    fn a_path_stays_in_the_hierarchy_and_out_of_systemds_scopes() {
        let path = relative("/kubepods/burstable/podx/0123").unwrap();
        assert_eq!(path, Path::new("kubepods/burstable/podx/0123"));
        for bad in ["", "/", "../x", "/a/../../x"] {
            assert!(matches!(relative(bad), Err(CgroupError::BadPath(_))), "{bad}");
        }
        let error = relative("kubepods-pod1.slice:cri-containerd:0123")
            .unwrap_err()
            .to_string();
        assert!(error.contains("set cgroupDriver: cgroupfs"), "{error}");
    }

    #[test]
    fn the_hierarchy_is_found_where_both_versions_are() {
        let text = "31 25 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
                    32 31 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                    33 31 0:29 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(mounted(text).unwrap(), Path::new("/sys/fs/cgroup/unified"));
        assert_eq!(mounted("31 25 0:27 / / rw - ext4 /dev/vda rw"), None);
    }
}
