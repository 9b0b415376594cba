//! KubeVirt manifests: loading, validation and the plan of the VM they describe.
//!
//! All functions are pure: they open no files and read no clock. A manifest is untrusted input: every
//! error in it is a [`FieldError`] with a path, never a panic.
//!
//! ```text
//! text ── load ──▶ Vmi ── validate ──▶ () or field errors
//!                   └──── plan(PodResources) ──▶ VmPlan (defaults applied, every source resolved)
//!
//! text ── read_objects ──▶ Object … VirtualMachine ── expand ──▶ Vmi (with instance type and preference)
//! ```

#![warn(missing_docs)]

mod field;
pub mod instancetype;
mod load;
mod mac;
mod names;
pub mod objects;
mod plan;
mod quantity;
mod schema;
pub mod types;
mod validate;

pub use field::{CauseReason, FieldError, Warning};
pub use load::{ClaimSize, InvalidDocument, LoadError, Loaded, MANIFEST_LIMIT, Metadata, Vmi, load};
pub use names::subdomain_fault;
pub use plan::{
    AgentCredential, BlockSize, BootPlan, CacheMode, Controller, CredentialsPlan, DeviceType, DiskPlan,
    DiskSource, ErrorPolicy, FileId, FileRef, FormatPolicy, InterfaceUpdate, KERNEL_VOLUME, KernelFile,
    KernelOverride, LiveUpdate, Memory, NewVolume, NicBinding, NicDhcp, NicNetwork, NicPlan, NicPort,
    NicProtocol, PlugError, PlugPlan, PodResources, ScsiAddress, ScsiController, SeedData, SeedLayout,
    Topology, VmPlan, VolumeImage, WatchdogAction, credential_volume, is_credential_volume, plan,
    volume_images,
};
pub use quantity::{Quantity, QuantityError};
pub use validate::{validate, warnings};
