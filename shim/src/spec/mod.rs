//! A pod that is a VM: what its containers are, and what the VM is made of.
//!
//! ```text
//! OCI spec ── role ──▶ sandbox: network namespace and cgroup
//!                ├───▶ volume:  its root filesystem holds a containerDisk, or the files of kernelBoot
//!                └───▶ VM:      annotation husk.io/vmi + mounts, devices, volume containers ── vm ──▶ VmPlan
//! ```
//!
//! In a launcher pod of KubeVirt's, the VMI comes by `SyncVmi` instead of the annotation.
//!
//! Pure, but for the numbers of devices: nothing that belongs to a volume is opened here.

mod annotations;
mod devices;
mod error;
mod launcher;
mod limit;
mod mounts;
mod network;
mod role;
mod vm;

pub use annotations::{annotation, display_name, uid};
pub use error::SpecError;
pub use launcher::LauncherArgs;
pub use limit::MemoryLimit;
pub use network::network;
pub use role::{Role, role};
pub use vm::{VmContainer, annotated_vmi, load_vmi};

#[cfg(test)]
mod tests;
