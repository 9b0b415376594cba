//! A node that leaves Husk: the administrator sets the label `husk.io/node=leaving`. When its VMIs are gone, the agent
//! removes the shim, so that the label can go.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

/// The label of Husk's nodes, and its value on one that leaves.
const LABEL: &str = "husk.io/node";
const LEAVING: &str = "leaving";

/// The VMIs of the node that have not ended, as `NAMESPACE/NAME`. None before the first list.
pub type NodeVmis = watch::Receiver<Option<BTreeSet<String>>>;

/// Returns whether the node has the label.
pub(super) fn is_leaving(node: &Node) -> bool {
    let labels = node.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(LABEL)).map(String::as_str) == Some(LEAVING)
}

/// How far the departure of a node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Departure {
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

impl Departure {
    /// The state of a node with these VMIs.
    pub(super) fn of(
        vmis: Option<&BTreeSet<String>>,
        is_installed: bool,
        failure: Option<&String>,
    ) -> Departure {
        match (vmis, failure) {
            (None, _) => Departure::Listing,
            (Some(vmis), _) if !vmis.is_empty() => Departure::Waiting(vmis.clone()),
            _ if !is_installed => Departure::Removed,
            (_, Some(failure)) => Departure::Failed(failure.clone()),
            _ => Departure::Ready,
        }
    }
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

    /// Returns whether the node has the shim.
    pub(super) fn is_installed(&self) -> bool {
        let below = self.versions.strip_prefix("/").unwrap_or(&self.versions);
        self.root.join(below).exists()
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
    fn only_the_value_leaving_counts() {
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
    fn the_shim_goes_when_no_vmi_is_left() {
        let vmis: BTreeSet<String> = ["default/a".to_owned()].into();
        let none = BTreeSet::new();
        let failure = "shims of pods still run".to_owned();
        assert_eq!(Departure::of(None, true, None), Departure::Listing);
        assert_eq!(Departure::of(None, false, None), Departure::Listing);
        let waiting = Departure::Waiting(vmis.clone());
        assert_eq!(Departure::of(Some(&vmis), true, None), waiting);
        assert_eq!(Departure::of(Some(&vmis), false, Some(&failure)), waiting);
        assert_eq!(Departure::of(Some(&none), true, None), Departure::Ready);
        let failed = Departure::Failed(failure.clone());
        assert_eq!(Departure::of(Some(&none), true, Some(&failure)), failed);
        assert_eq!(
            Departure::of(Some(&none), false, Some(&failure)),
            Departure::Removed
        );
    }

    #[tokio::test]
    async fn the_reason_of_a_removal_that_fails_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("husk");
        let (root, versions) = (dir.path().to_owned(), dir.path().join("opt/husk"));
        std::fs::create_dir_all(&versions).unwrap();
        let script = "#!/bin/sh\n[ \"$1 $2 $3 $4 $6\" = 'node uninstall --restart --host-root --versions' ] || exit 2\n\
                      [ -e \"$5/busy\" ] && { echo note: x >&2; echo error: pods run >&2; exit 1; }\n\
                      rmdir \"$5$7\"\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::write(dir.path().join("busy"), "").unwrap();
        let shim = NodeShim::new(program, root, "/opt/husk".into());
        assert_eq!(shim.remove().await, Err("pods run".to_owned()));
        assert!(shim.is_installed());
        std::fs::remove_file(dir.path().join("busy")).unwrap();
        assert_eq!(shim.remove().await, Ok(()));
        assert!(!shim.is_installed());
        let none = NodeShim::new(dir.path().join("none"), "/".into(), "/opt/husk".into());
        let error = none.remove().await.unwrap_err();
        assert!(error.contains("none: No such file"), "{error}");
    }
}
