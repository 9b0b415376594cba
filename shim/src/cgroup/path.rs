//! Where the cgroup of a container is.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::CgroupError;

/// `linux.cgroupsPath` of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CgroupPath {
    /// Of the cgroupfs driver: a path below the hierarchy's root.
    Plain(PathBuf),
    /// Of the systemd driver: a scope in a slice.
    Scope {
        /// `kubepods-besteffort-pod1.slice`
        slice: String,
        /// `cri-containerd-0123.scope`
        scope: String,
    },
}

impl CgroupPath {
    /// Reads it: `/kubepods/pod1/0123`, or `SLICE:PREFIX:NAME`.
    ///
    /// # Errors
    /// It leads out of the hierarchy, or to its root.
    pub fn parse(text: &str) -> Result<CgroupPath, CgroupError> {
        let bad = || CgroupError::BadPath(text.to_owned());
        let parts: Vec<&str> = text.split(':').collect();
        if let [slice, prefix, name] = parts.as_slice() {
            let is_part = |part: &str| !part.is_empty() && !part.contains('/');
            if !slice.ends_with(".slice") || ![*slice, *prefix, *name].into_iter().all(is_part) {
                return Err(bad());
            }
            return Ok(CgroupPath::Scope {
                slice: (*slice).to_owned(),
                scope: format!("{prefix}-{name}.scope"),
            });
        }
        let mut path = PathBuf::new();
        for component in Path::new(text).components() {
            match component {
                Component::Normal(part) => path.push(part),
                Component::RootDir | Component::CurDir => {}
                Component::ParentDir | Component::Prefix(_) => return Err(bad()),
            }
        }
        match path.as_os_str().is_empty() {
            true => Err(bad()),
            false => Ok(CgroupPath::Plain(path)),
        }
    }

    /// The path below the hierarchy's root.
    #[must_use]
    pub fn relative(&self) -> PathBuf {
        match self {
            CgroupPath::Plain(path) => path.clone(),
            CgroupPath::Scope { slice, scope } => slices(slice).join(scope),
        }
    }
}

/// `a-b.slice` lies in `a.slice`.
fn slices(slice: &str) -> PathBuf {
    let name = slice.strip_suffix(".slice").unwrap_or(slice);
    if name == "-" {
        return PathBuf::new();
    }
    let ends = name.match_indices('-').map(|(at, _)| at);
    let ends = ends.chain([name.len()]);
    ends.map(|end| format!("{}.slice", &name[..end])).collect()
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
    fn both_drivers_paths_are_found() {
        let relative = |text| CgroupPath::parse(text).unwrap().relative();
        assert_eq!(
            relative("/kubepods/burstable/podx/0123"),
            Path::new("kubepods/burstable/podx/0123")
        );
        assert_eq!(
            relative("kubepods-burstable-pod1_2.slice:cri-containerd:0123"),
            Path::new(
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-0123.scope"
            )
        );
        assert_eq!(relative("-.slice:a:b"), Path::new("a-b.scope"));
        for bad in [
            "",
            "/",
            "../x",
            "/a/../../x",
            "a.slice::x",
            "x:y:z",
            "a.slice:b/..:c",
        ] {
            CgroupPath::parse(bad).unwrap_err();
        }
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
