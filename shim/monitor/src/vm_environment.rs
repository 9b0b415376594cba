//! The environment of a VM: how its paths are resolved, its scratch directory, its pod's network and its cgroup.

use std::fmt;
use std::path::PathBuf;

use husk_volumes::{PathPolicy, ScratchDir};

use crate::vmm_process::VmmPlacement;

/// The environment of one VM.
#[derive(Debug)]
pub struct VmEnvironment {
    /// Scratch directory for ephemeral data.
    pub scratch: ScratchDir,
    /// The paths of the plan that may be opened: any of the caller's, or those that the pod was given.
    pub paths: PathPolicy,
    /// The pod's network. Without one, a VM with interfaces gets a namespace of its own.
    pub network: Option<PodNetwork>,
    /// The cgroup and OOM score of the VMM's process.
    pub placement: VmmPlacement,
}

impl VmEnvironment {
    /// The environment of a VM run from the command line: any path the caller may open, in the caller's cgroup.
    #[must_use]
    pub fn of_caller(netns: Option<PathBuf>) -> VmEnvironment {
        VmEnvironment {
            scratch: ScratchDir::locate(),
            paths: PathPolicy::Caller,
            network: netns.map(PodNetwork::named),
            placement: VmmPlacement::default(),
        }
    }
}

/// The network of a pod. Displayed as the user or runtime named it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetwork {
    /// Path of its network namespace.
    pub netns: PathBuf,
    /// Path of the pod's resolv.conf. Without one the guest uses the host's name servers.
    pub resolv_conf: Option<PathBuf>,
    /// It was named by `--netns`.
    by_option: bool,
}

impl PodNetwork {
    /// The network namespace of `--netns`.
    #[must_use]
    pub fn named(netns: PathBuf) -> PodNetwork {
        PodNetwork {
            netns,
            resolv_conf: None,
            by_option: true,
        }
    }

    /// The network namespace that a container runtime made.
    #[must_use]
    pub fn given(netns: PathBuf, resolv_conf: Option<PathBuf>) -> PodNetwork {
        PodNetwork {
            netns,
            resolv_conf,
            by_option: false,
        }
    }

    /// True if a container runtime made it, and the user did not name it.
    pub(crate) fn is_given(&self) -> bool {
        !self.by_option
    }

    /// The remedy if the path is not a network namespace.
    pub(crate) fn hint(&self) -> &'static str {
        match self.by_option {
            true => ": name a network namespace, such as /run/netns/NAME or /proc/PID/ns/net",
            false => "",
        }
    }
}

impl fmt::Display for PodNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given_by = if self.by_option {
            "--netns"
        } else {
            "the pod's network"
        };
        write!(f, "{given_by} {}", self.netns.display())
    }
}
