//! A container of a pod: known by the cgroup of its process, and what containerd mounts in it.
//!
//! The kubelet's directory of a pod does not show the directory of a `hostPath` volume. The container's specification
//! does, and only root writes it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use serde_json::Value;

/// Directories of containerd with its containers, on the node. The second one is of k3s.
const BUNDLES: [&str; 2] = [
    "/run/containerd/io.containerd.runtime.v2.task/k8s.io",
    "/run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io",
];
/// Largest specification that is read, in bytes.
const MAX_SPEC: u64 = 4 << 20;

/// A container of a pod.
#[derive(Debug)]
pub(super) struct Container {
    id: String,
}

impl Container {
    /// The container of the pod `uid` that a process is in; `None` if it is in no cgroup of the pod. `process` is the
    /// directory `/proc/PID`.
    pub(super) fn of(process: &OwnedFd, uid: &str) -> io::Result<Option<Container>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = openat(process, "cgroup", flags, Mode::empty())?;
        let cgroup = io::read_to_string(File::from(file))?;
        Ok(Container::of_cgroup(&cgroup, uid))
    }

    pub(super) fn of_cgroup(cgroup: &str, uid: &str) -> Option<Container> {
        // The kubelet's driver for systemd writes a UID with underscores.
        let pod = [format!("pod{uid}"), format!("pod{}", uid.replace('-', "_"))];
        let id = cgroup.lines().find_map(|line| {
            let mut parts = line.split('/');
            parts.find(|part| pod.iter().any(|pod| part.contains(pod)))?;
            Some(parts.next().unwrap_or_default())
        })?;
        let scope = id
            .strip_prefix("cri-containerd-")
            .and_then(|id| id.strip_suffix(".scope"));
        let id = scope.unwrap_or(id).to_owned();
        Some(Container { id })
    }

    /// Device and inode of the node's directory that is mounted at `/VOLUME`; `None` if that is not known. `root` is
    /// the node's root directory.
    pub(super) fn source(&self, root: &Path, volume: &str) -> Option<(u64, u64)> {
        if self.id.is_empty() || !self.id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return None;
        }
        let root = openat(CWD, root, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let spec = BUNDLES
            .iter()
            .find_map(|bundles| specification(&root, &Path::new(bundles).join(&self.id)).ok())?;
        let at = format!("/{volume}");
        let mounts = spec["mounts"].as_array()?;
        // A later mount hides an earlier one.
        let mount = mounts.iter().rfind(|mount| mount["destination"] == at.as_str())?;
        if mount["type"] != "bind" {
            return None;
        }
        let directory = open(&root, Path::new(mount["source"].as_str()?), OFlags::PATH).ok()?;
        let status = fstat(&directory).ok()?;
        Some((status.st_dev, status.st_ino))
    }
}

fn specification(root: &OwnedFd, bundle: &Path) -> io::Result<Value> {
    let file = File::from(open(root, &bundle.join("config.json"), OFlags::RDONLY)?);
    let mut text = Vec::new();
    file.take(MAX_SPEC).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Opens a path of the node.
fn open(root: &OwnedFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    Ok(openat2(
        root,
        path,
        flags | OFlags::CLOEXEC,
        Mode::empty(),
        resolve,
    )?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_source_of_a_mount_at_the_volumes_path_is_found() {
        let node = tempfile::tempdir().unwrap();
        let path = |path: &str| node.path().join(path.trim_start_matches('/'));
        for directory in ["srv/first", "srv/second", "run/k3s"] {
            fs::create_dir_all(path(directory)).unwrap();
        }
        // Links of the node are those of its root directory.
        symlink("/srv/second", path("link")).unwrap();
        let mount =
            |at: &str, kind: &str, source: &str| json!({"destination": at, "type": kind, "source": source});
        let mounts = json!([
            mount("/data", "bind", "/srv/first"),
            mount("/data", "bind", "/link"),
            mount("/hidden", "bind", "/srv/first"),
            mount("/hidden", "tmpfs", "tmpfs"),
            mount("/proc", "proc", "proc"),
            mount("/gone", "bind", "/srv/third"),
            {"destination": "/bad"},
        ]);
        for (bundles, id) in BUNDLES.iter().zip(["aa", "bb"]) {
            let bundle = path(bundles).join(id);
            fs::create_dir_all(&bundle).unwrap();
            fs::write(bundle.join("config.json"), json!({"mounts": mounts}).to_string()).unwrap();
            let second = path("srv/second").metadata().unwrap();
            let source = |volume| Container { id: id.to_owned() }.source(node.path(), volume);
            assert_eq!(source("data"), Some((second.dev(), second.ino())));
            for none in ["hidden", "proc", "gone", "bad", "other"] {
                assert_eq!(source(none), None, "{none}");
            }
        }
        fs::write(path(BUNDLES[0]).join("aa/config.json"), "{").unwrap();
        for unknown in ["aa", "cc", "", "..", "../k8s.io/bb"] {
            let container = Container {
                id: unknown.to_owned(),
            };
            assert_eq!(container.source(node.path(), "data"), None, "{unknown}");
        }
    }

    #[test]
    fn a_pod_and_its_container_are_known_by_the_cgroup() {
        let cgroupfs = "0::/kubepods/burstable/pod12ab-34/0123\n";
        let systemd = "0::/kubepods.slice/kubepods-pod12ab_34.slice/cri-containerd-0123.scope\n";
        for cgroup in [cgroupfs, systemd] {
            assert_eq!(Container::of_cgroup(cgroup, "12ab-34").unwrap().id, "0123");
            assert!(Container::of_cgroup(cgroup, "12ab-35").is_none());
        }
        assert_eq!(
            Container::of_cgroup("0::/kubepods/pod12ab-34", "12ab-34")
                .unwrap()
                .id,
            ""
        );
    }
}
