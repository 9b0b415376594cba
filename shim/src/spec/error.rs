//! Why a container cannot be a part of a VM.

use husk_vmi::{FieldError, LoadError};

use husk_cgroup::mib;

/// Why a container cannot be what it is meant to be.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Nothing says which VM it is.
    #[error("{container} has no annotation husk.io/vmi: give it the VirtualMachineInstance there, as JSON")]
    NoVmi {
        /// The container.
        container: String,
    },
    /// A sidecar, or an init container.
    #[error(
        "{container} cannot run: a pod of the runtime class husk is a VM, called {vm:?} (annotation husk.io/vm-container \
         names another), and containers whose root filesystem is one of its volumes, called volumeNAME or with the \
         annotation husk.io/volume: NAME; there is nothing a process could run in"
    )]
    Neither {
        /// The container.
        container: String,
        /// What the VM's container is called.
        vm: String,
    },
    /// A volume container that no pod has.
    #[error(
        "{container} is the volume {volume:?} of a VM, but belongs to no pod: give it the annotation husk.io/vmi too"
    )]
    VolumeAlone {
        /// The container.
        container: String,
        /// The volume.
        volume: String,
    },
    /// The annotation is no manifest.
    #[error("annotation husk.io/vmi: {0}")]
    Manifest(#[from] LoadError),
    /// It is more than one, or something else.
    #[error("annotation husk.io/vmi: one VirtualMachineInstance is wanted, there are {0} objects")]
    Objects(usize),
    /// Fields of it are wrong.
    #[error("annotation husk.io/vmi: {}", lines(.0))]
    Fields(Vec<FieldError>),
    /// A device that this host does not have.
    #[error("device {path} ({major}:{minor}) of the container is no block device of this host")]
    Device {
        /// In the container.
        path: String,
        /// Its numbers.
        major: i64,
        /// The second.
        minor: i64,
    },
    /// There is no namespace whose devices could be the guest's.
    #[error(
        "{container} is on the node's own network, which a guest cannot have: leave hostNetwork out, or set \
         spec.domain.devices.autoattachPodInterface to false and name no interfaces"
    )]
    NodeNetwork {
        /// The container.
        container: String,
    },
    /// The VM would be killed before long.
    #[error(
        "the memory limit of {container} is {}, and the VM needs {}: {} for the guest and {} around it; raise \
         resources.limits.memory, or lower {field}",
        mib(*limit), mib(guest + overhead), mib(*guest), mib(*overhead)
    )]
    MemoryLimit {
        /// The container.
        container: String,
        /// Bytes.
        limit: u64,
        /// Bytes of guest memory that count towards it.
        guest: u64,
        /// Bytes beside that.
        overhead: u64,
        /// The field that says how much the guest has.
        field: String,
    },
    /// The guest's huge pages do not fit.
    #[error(
        "the limit of {container} on huge pages of {} is {}, and the guest has {}: raise \
         resources.limits.hugepages-*, or lower {field}",
        mib(*page), mib(*limit), mib(*guest)
    )]
    HugepageLimit {
        /// The container.
        container: String,
        /// Bytes of a page.
        page: u64,
        /// Bytes.
        limit: u64,
        /// Bytes.
        guest: u64,
        /// The field that says how much the guest has.
        field: String,
    },
}

fn lines(errors: &[FieldError]) -> String {
    let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
    lines.join("; ")
}
