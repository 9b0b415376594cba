//! A node from which Husk is being removed: the administrator sets the label `husk.io/node=leaving`. When its VMIs are
//! gone, the agent removes the shim, so that the label can go.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, ResolveFlags, open, openat2, statat};
use rustix::io::Errno;
use tokio::sync::watch;

use crate::vmi::LAUNCHER_VOLUME;

/// The label of Husk's nodes, and its value on one that leaves.
const LABEL: &str = "husk.io/node";
const LEAVING: &str = "leaving";

/// The shim in the directory of a version.
const SHIM: &str = "containerd-shim-husk-v2";
/// Files that `husk node install` keeps until the handler is removed: the record of the installation, and its journal.
const RECORDS: [&str; 2] = [".installation", ".change"];
/// Delay before another removal after the first failure, and its maximum.
const RETRY: Duration = Duration::from_secs(15);
const MAX_RETRY: Duration = Duration::from_secs(300);

/// The VMIs of the node that have not ended, as `NAMESPACE/NAME`. None before the first list.
pub type NodeVmis = watch::Receiver<Option<BTreeSet<String>>>;

/// VMIs and pods that need the shim.
#[derive(Debug)]
pub struct ShimUsers {
    /// The VMIs that name the node.
    pub vmis: NodeVmis,
    /// The pods of VMIs, which may not name it yet.
    pub launchers: LauncherPods,
}

/// Returns whether the node has the label.
pub(super) fn is_leaving(node: &Node) -> bool {
    let labels = node.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(LABEL)).map(String::as_str) == Some(LEAVING)
}

/// Progress of the removal of a leaving node's shim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShimRemoval {
    /// The agent has not listed the VMIs of the node yet.
    Listing,
    /// It waits for the end of these VMIs.
    Waiting(BTreeSet<String>),
    /// The shim can be removed.
    Ready,
    /// The shim was not removed, for this reason. The agent tries again.
    Failed(String),
    /// The shim is gone.
    Removed,
}

impl ShimRemoval {
    /// The state of a node with these VMIs.
    pub(super) fn of(
        vmis: Option<&BTreeSet<String>>,
        is_installed: bool,
        failure: Option<&String>,
    ) -> ShimRemoval {
        match (vmis, failure) {
            (None, _) => ShimRemoval::Listing,
            (Some(vmis), _) if !vmis.is_empty() => ShimRemoval::Waiting(vmis.clone()),
            _ if !is_installed => ShimRemoval::Removed,
            (_, Some(failure)) => ShimRemoval::Failed(failure.clone()),
            _ => ShimRemoval::Ready,
        }
    }
}

/// Delay after this number of failures.
pub(super) fn retry_after(failures: u32) -> Duration {
    let factor = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
    RETRY.saturating_mul(factor).min(MAX_RETRY)
}

/// The launcher pods of the node that have not ended. One that waits for its image or volumes has no shim yet, and its
/// VMI does not name the node. The agent may not list pods, but sees the kubelet's directories.
#[derive(Debug, Clone)]
pub struct LauncherPods {
    pods: PathBuf,
    logs: PathBuf,
}

impl LauncherPods {
    /// The pods in the kubelet's directories of pods and of their logs.
    #[must_use]
    pub fn at(pods: PathBuf, logs: PathBuf) -> LauncherPods {
        LauncherPods { pods, logs }
    }

    /// Their names, as `pod NAMESPACE/NAME` where the kubelet has logs, else as `pod UID`.
    pub(super) fn names(&self) -> BTreeSet<String> {
        let uids = names(&self.pods).filter(|uid| self.pods.join(uid).join(LAUNCHER_VOLUME).is_dir());
        let logs: Vec<_> = names(&self.logs).collect();
        let named = |uid: String| {
            let mut parts = logs.iter().map(|log| log.split('_').collect::<Vec<_>>());
            let found = parts.find_map(|parts| match parts[..] {
                [namespace, name, of] if of == uid => Some(format!("pod {namespace}/{name}")),
                _ => None,
            });
            found.unwrap_or_else(|| format!("pod {uid}"))
        };
        uids.map(named).collect()
    }
}

fn names(directory: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

/// The shim that is installed on the node, and the program that removes it.
#[derive(Debug, Clone)]
pub struct NodeShim {
    program: PathBuf,
    root: PathBuf,
    versions: PathBuf,
}

impl NodeShim {
    /// The shim below the directory `versions` of the node, whose root directory is `root`. `program` is `husk`.
    #[must_use]
    pub fn new(program: PathBuf, root: PathBuf, versions: PathBuf) -> NodeShim {
        NodeShim {
            program,
            root,
            versions,
        }
    }

    /// Returns whether the node has the shim, or a handler for it. True if that is not known.
    pub(super) fn is_installed(&self) -> bool {
        match self.find() {
            Ok(is_installed) => is_installed,
            Err(error) => error != Errno::NOENT && error != Errno::NOTDIR,
        }
    }

    fn find(&self) -> Result<bool, Errno> {
        let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(&self.root, directory, Mode::empty())?;
        // Links of the node are those of its root directory.
        let inside = ResolveFlags::IN_ROOT;
        let versions: OwnedFd = openat2(&root, &self.versions, directory, Mode::empty(), inside)?;
        let has = |path: &Path| statat(versions.as_fd(), path, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        if RECORDS.iter().any(|name| has(Path::new(name))) {
            return Ok(true);
        }
        for entry in Dir::read_from(&versions)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy();
            if !name.starts_with('.') && has(&Path::new(&*name).join(SHIM)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes it from the node, and restarts containerd.
    ///
    /// # Errors
    /// The reason in one line, such as shims that still run.
    pub(super) async fn remove(&self) -> Result<(), String> {
        let mut command = Command::new(&self.program);
        command
            .args(["node", "uninstall", "--restart", "--host-root"])
            .arg(&self.root)
            .arg("--versions")
            .arg(&self.versions);
        let output = tokio::task::spawn_blocking(move || command.output()).await;
        let output = output.map_err(|error| error.to_string())?;
        let output = output.map_err(|error| format!("{}: {error}", self.program.display()))?;
        if output.status.success() {
            return Ok(());
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let error = errors.lines().find_map(|line| line.strip_prefix("error: "));
        Err(match error {
            Some(error) => error.to_owned(),
            None => format!("{}: {}", self.program.display(), output.status),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_label_value_leaving_starts_removal() {
        let with = |value: Option<&str>| {
            let mut node = Node::default();
            node.metadata.labels = value.map(|value| [(LABEL.to_owned(), value.to_owned())].into());
            is_leaving(&node)
        };
        assert_eq!(
            [None, Some("true"), Some(""), Some("leaving")].map(with),
            [false, false, false, true]
        );
    }

    #[test]
    fn the_shim_is_removed_when_no_vmi_is_left() {
        let vmis: BTreeSet<String> = ["default/a".to_owned()].into();
        let none = BTreeSet::new();
        let failure = "shims of pods still run".to_owned();
        assert_eq!(ShimRemoval::of(None, true, None), ShimRemoval::Listing);
        assert_eq!(ShimRemoval::of(None, false, None), ShimRemoval::Listing);
        let waiting = ShimRemoval::Waiting(vmis.clone());
        assert_eq!(ShimRemoval::of(Some(&vmis), true, None), waiting);
        assert_eq!(ShimRemoval::of(Some(&vmis), false, Some(&failure)), waiting);
        assert_eq!(ShimRemoval::of(Some(&none), true, None), ShimRemoval::Ready);
        let failed = ShimRemoval::Failed(failure.clone());
        assert_eq!(ShimRemoval::of(Some(&none), true, Some(&failure)), failed);
        assert_eq!(
            ShimRemoval::of(Some(&none), false, Some(&failure)),
            ShimRemoval::Removed
        );
    }

    #[test]
    fn only_versions_and_records_are_an_installation() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let shim = NodeShim::new("husk".into(), root.to_owned(), "/opt/husk".into());
        assert!(!shim.is_installed());
        // The link is the node's: below its root directory.
        symlink("/var/opt", root.join("opt")).unwrap();
        let versions = root.join("var/opt/husk");
        fs::create_dir_all(versions.join("notes")).unwrap();
        fs::write(versions.join("README"), "").unwrap();
        assert!(!shim.is_installed());
        for record in RECORDS {
            fs::write(versions.join(record), "").unwrap();
            assert!(shim.is_installed());
            fs::remove_file(versions.join(record)).unwrap();
        }
        fs::create_dir(versions.join("1")).unwrap();
        fs::write(versions.join("1").join(SHIM), "").unwrap();
        assert!(shim.is_installed());
    }

    #[test]
    fn launcher_pods_are_known_from_the_kubelets_directories() {
        let dir = tempfile::tempdir().unwrap();
        let (pods, logs) = (dir.path().join("pods"), dir.path().join("logs"));
        let launchers = LauncherPods::at(pods.clone(), logs.clone());
        assert!(launchers.names().is_empty());
        for uid in ["1", "2"] {
            fs::create_dir_all(pods.join(uid).join(LAUNCHER_VOLUME)).unwrap();
        }
        fs::create_dir_all(pods.join("3/volumes/kubernetes.io~empty-dir/cache")).unwrap();
        fs::create_dir_all(logs.join("default_virt-launcher-a-x_1")).unwrap();
        fs::create_dir_all(logs.join("default_virt-launcher-b-x_4")).unwrap();
        let wanted = ["pod 2", "pod default/virt-launcher-a-x"].map(str::to_owned);
        assert_eq!(launchers.names(), wanted.into());
    }

    #[test]
    fn failed_removals_are_retried_at_growing_intervals() {
        let seconds = [1, 2, 3, 5, 6, 1000].map(|failures| retry_after(failures).as_secs());
        assert_eq!(seconds, [15, 30, 60, 240, 300, 300]);
    }

    #[tokio::test]
    async fn the_reason_of_a_removal_that_fails_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("husk");
        let (root, versions) = (dir.path().to_owned(), dir.path().join("opt/husk"));
        fs::create_dir_all(&versions).unwrap();
        fs::write(versions.join(".installation"), "").unwrap();
        let script = "#!/bin/sh\n[ \"$1 $2 $3 $4 $6\" = 'node uninstall --restart --host-root --versions' ] || exit 2\n\
                      [ -e \"$5/busy\" ] && { echo note: x >&2; echo error: pods run >&2; exit 1; }\n\
                      rm -r \"$5$7\"\n";
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        fs::write(dir.path().join("busy"), "").unwrap();
        let shim = NodeShim::new(program, root, "/opt/husk".into());
        assert_eq!(shim.remove().await, Err("pods run".to_owned()));
        assert!(shim.is_installed());
        fs::remove_file(dir.path().join("busy")).unwrap();
        assert_eq!(shim.remove().await, Ok(()));
        assert!(!shim.is_installed());
        let none = NodeShim::new(dir.path().join("none"), "/".into(), "/opt/husk".into());
        let error = none.remove().await.unwrap_err();
        assert!(error.contains("none: No such file"), "{error}");
    }
}
