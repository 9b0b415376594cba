//! Plans the VM of a VMI: applies the defaults of KubeVirt's webhooks and resolves all volume sources.

mod boot;
mod build;
mod bytes_as_text;
mod credentials;
mod disk;
pub(crate) mod disks;
mod hotplug;
mod images;
mod io_threads;
pub(crate) mod limits;
mod live_update;
mod machine;
mod nic;
mod nics;
mod types;
pub(crate) mod volume_source;

pub use build::plan;
pub use credentials::{AgentCredential, CredentialsPlan, credential_volume, is_credential_volume};
pub use disk::{
    BlockSize, CacheMode, Controller, DeviceType, DiskPlan, DiskSource, ErrorPolicy, FileId, FormatPolicy,
    ScsiAddress, ScsiController, SeedData, SeedLayout,
};
pub use hotplug::{NewVolume, PlugError, PlugPlan};
pub use images::{VolumeImage, volume_images};
pub use live_update::{InterfaceUpdate, LiveUpdate};
pub use nic::{NicBinding, NicDhcp, NicNetwork, NicPlan, NicPort, NicProtocol};
pub use types::{
    BootPlan, FileRef, KernelFile, KernelOverride, Memory, PodResources, Topology, VmPlan, WatchdogAction,
};
pub use volume_source::KERNEL_VOLUME;
