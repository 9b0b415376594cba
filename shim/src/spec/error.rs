//! Errors of the specs of a pod's containers.

use husk_vmi::{FieldError, LoadError};

use husk_cgroup::mib;

/// An error of the spec of a container.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The container has no VMI.
    #[error("{container} has no annotation husk.io/vmi: give it the VirtualMachineInstance there, as JSON")]
    NoVmi {
        /// Id or name of the container.
        container: String,
    },
    /// The container is neither the VM nor a volume, but for instance a sidecar.
    #[error(
        "{container} cannot run: a pod of the runtime class husk is a VM, called {vm:?} (annotation husk.io/vm-container \
         names another), and containers whose root filesystem is one of its volumes, called volumeNAME or with the \
         annotation husk.io/volume: NAME; only the VM's container and volume containers are supported"
    )]
    Neither {
        /// Id or name of the container.
        container: String,
        /// Name of the VM's container.
        vm: String,
    },
    /// The launcher's command does not say which VM it is for.
    #[error("{container}: virt-launcher-monitor has no {flag}")]
    LauncherFlag {
        /// Id or name of the container.
        container: String,
        /// The missing flag.
        flag: &'static str,
    },
    /// A volume container outside of a pod.
    #[error(
        "{container} is the volume {volume:?} of a VM, but is not in a pod: give it the annotation husk.io/vmi too"
    )]
    VolumeAlone {
        /// Id or name of the container.
        container: String,
        /// The volume.
        volume: String,
    },
    /// The annotation is not a manifest.
    #[error("annotation husk.io/vmi: {0}")]
    Manifest(#[from] LoadError),
    /// The annotation does not hold exactly one VMI.
    #[error("annotation husk.io/vmi: expected one VirtualMachineInstance, found {0} objects")]
    Objects(usize),
    /// Fields of the VMI are invalid.
    #[error("annotation husk.io/vmi: {}", lines(.0))]
    Fields(Vec<FieldError>),
    /// The host does not have the device.
    #[error("device {path} ({major}:{minor}) of the container is not a block device of this host")]
    Device {
        /// Path in the container.
        path: String,
        /// Major number.
        major: i64,
        /// Minor number.
        minor: i64,
    },
    /// The pod uses the node's network.
    #[error(
        "{container} is on the node's own network, which a guest cannot have: remove hostNetwork, or set \
         spec.domain.devices.autoattachPodInterface to false and name no interfaces"
    )]
    NodeNetwork {
        /// Id or name of the container.
        container: String,
    },
    /// The memory limit is too small for the VM.
    #[error(
        "the memory limit of {container} is {}, and the VM needs {}: {} for the guest and {} overhead; raise \
         resources.limits.memory, or lower {field}",
        mib(*limit), mib(guest + overhead), mib(*guest), mib(*overhead)
    )]
    MemoryLimit {
        /// Id or name of the container.
        container: String,
        /// Bytes.
        limit: u64,
        /// Guest memory that counts towards the limit, in bytes.
        guest: u64,
        /// Further memory, in bytes.
        overhead: u64,
        /// Field with the size of guest memory.
        field: String,
    },
    /// The limit of huge pages is too small for the guest.
    #[error(
        "the limit of {container} on huge pages of {} is {}, and the guest has {}: raise \
         resources.limits.hugepages-*, or lower {field}",
        mib(*page), mib(*limit), mib(*guest)
    )]
    HugepageLimit {
        /// Id or name of the container.
        container: String,
        /// Page size in bytes.
        page: u64,
        /// Bytes.
        limit: u64,
        /// Bytes.
        guest: u64,
        /// Field with the size of guest memory.
        field: String,
    },
}

impl SpecError {
    /// The error of a VMI that did not come by an annotation: a line for each field.
    #[must_use]
    pub fn of_vmi(&self) -> String {
        match self {
            SpecError::Manifest(error) => error.to_string(),
            SpecError::Objects(count) => {
                format!("expected one VirtualMachineInstance, found {count} objects")
            }
            SpecError::Fields(errors) => {
                let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
                lines.join("\n")
            }
            other => other.to_string(),
        }
    }
}

fn lines(errors: &[FieldError]) -> String {
    let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
    lines.join("; ")
}
