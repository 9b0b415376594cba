//! Where a VM is, apart from what it is: whose paths its plan has, where its scratch files lie, which network is its
//! pod's, what holds its VMM.

use std::fmt;
use std::path::PathBuf;

use husk_volumes::{PathPolicy, ScratchDir};

use crate::vmm_process::CgroupPlacement;

/// The environment of one VM.
#[derive(Debug)]
pub struct VmEnvironment {
    /// Where what the VM does not keep lies.
    pub scratch: ScratchDir,
    /// How paths of the plan are opened.
    pub paths: PathPolicy,
    /// Its pod's network; none if it gets one of its own, as far as its plan has interfaces.
    pub network: Option<PodNetwork>,
    /// Where the VMM's process is.
    pub placement: CgroupPlacement,
}

impl VmEnvironment {
    /// Those of a VM that somebody runs by hand: what the caller may open, and wherever the caller is.
    #[must_use]
    pub fn of_caller(netns: Option<PathBuf>) -> VmEnvironment {
        VmEnvironment {
            scratch: ScratchDir::locate(),
            paths: PathPolicy::Caller,
            network: netns.map(PodNetwork::named),
            placement: CgroupPlacement::default(),
        }
    }
}

/// The network of a pod, whoever made it. Prints as whoever gave it knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetwork {
    /// Its namespace.
    pub netns: PathBuf,
    /// The pod's own; without one the guest's name servers are this machine's.
    pub resolv_conf: Option<PathBuf>,
    /// A person named it, by `--netns`.
    by_option: bool,
}

impl PodNetwork {
    /// Named by `--netns`.
    #[must_use]
    pub fn named(netns: PathBuf) -> PodNetwork {
        PodNetwork {
            netns,
            resolv_conf: None,
            by_option: true,
        }
    }

    /// Given by a container runtime.
    #[must_use]
    pub fn given(netns: PathBuf, resolv_conf: Option<PathBuf>) -> PodNetwork {
        PodNetwork {
            netns,
            resolv_conf,
            by_option: false,
        }
    }

    /// What to do about one that is none.
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
