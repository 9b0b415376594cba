//! From a VMI to the VM it describes: defaults applied as KubeVirt's webhooks do, sources resolved.

mod boot;
mod disk;
mod disks;
mod hotplug;
mod io_threads;
mod limits;
mod live;
mod machine;
mod nic;
mod nics;
mod source;
mod text;
mod types;

use uuid::Uuid;

pub use disk::{
    BlockSize, CacheMode, Controller, DeviceType, DiskPlan, DiskSource, ErrorPolicy, FileId, FormatRule,
    ScsiAddress, ScsiController, SeedData, SeedLayout,
};
pub(crate) use disks::effective;
pub use hotplug::{NewVolume, Plug, PlugError};
pub(crate) use limits::{limits, sizes};
pub use live::{Live, LiveInterface};
pub use nic::{NicBinding, NicDhcp, NicNetwork, NicPlan, NicPort, NicProtocol};
pub use source::KERNEL_VOLUME;
pub(crate) use source::decode;
pub use types::{BootPlan, FileRef, KernelFile, KernelOverride, Memory, PodResources, Topology, VmPlan};

use crate::field::FieldError;
use crate::load::Vmi;
use crate::validate::{notes, validate};

/// Seconds between the power button and the kill, where the manifest does not say.
const GRACE_PERIOD: u64 = 30;

impl Vmi {
    /// The path of the field that says how much memory the guest has.
    #[must_use]
    pub fn memory_field(&self) -> String {
        self.at(&machine::memory_given(self).0)
    }

    /// The path of the entry of this name in `networks`; of the list, if there is none.
    #[must_use]
    pub fn network_field(&self, name: &str) -> String {
        match self.spec.networks.iter().position(|network| network.name == name) {
            Some(i) => self.at(&format!("networks[{i}]")),
            None => self.at("networks"),
        }
    }
}

/// Plans the VM of a VMI. A VMI that does not validate has no plan.
///
/// Pure: nothing is opened, so paths in the plan may not exist.
///
/// # Errors
/// Everything [`validate`] refuses, then whatever cannot be met with what the caller has.
pub fn plan(vmi: &Vmi, resources: &PodResources) -> Result<VmPlan, Vec<FieldError>> {
    validate(vmi)?;
    let mut errors = Vec::new();
    let mut notes = notes(vmi);

    let domain = &vmi.spec.domain;
    let devices = &domain.devices;
    let uuid = domain.firmware.uuid.as_deref().filter(|uuid| !uuid.is_empty());
    let uuid = uuid
        .and_then(|uuid| Uuid::parse_str(uuid).ok())
        .unwrap_or(resources.uuid);
    let topology = machine::topology(vmi, &mut errors);
    let memory = machine::memory(vmi, &mut errors);
    let rtc_offset_seconds = machine::rtc_offset(vmi, resources.now_unix_seconds, &mut errors);
    let queues = if devices.block_multi_queue {
        topology.vcpus()
    } else {
        1
    };
    let mut disks = disks::plan(vmi, uuid, queues, resources, &mut errors);
    io_threads::assign(vmi, topology, &mut disks);
    let boot = boot::plan(vmi, &disks, resources, &mut errors, &mut notes);
    if !errors.is_empty() {
        return Err(errors);
    }
    Ok(VmPlan {
        name: vmi.name.clone(),
        namespace: vmi.namespace.clone(),
        hostname: source::host_name(vmi),
        subdomain: vmi.spec.subdomain.clone().filter(|name| !name.is_empty()),
        uid: vmi.uid.clone(),
        uuid,
        serial: domain.firmware.serial.clone().filter(|serial| !serial.is_empty()),
        topology,
        memory,
        scsi: (!devices.disable_hotplug || disks.iter().any(DiskPlan::is_scsi))
            .then_some(ScsiController { queues }),
        disks,
        nics: nics::plan(vmi, topology),
        boot,
        rng: devices.rng.is_some(),
        balloon: devices.autoattach_mem_balloon.unwrap_or(true),
        serial_console: devices.autoattach_serial_console.unwrap_or(true),
        acpi: domain
            .features
            .acpi
            .as_ref()
            .is_none_or(crate::types::Feature::is_on),
        rtc_offset_seconds,
        grace_period_seconds: vmi.spec.termination_grace_period_seconds.unwrap_or(GRACE_PERIOD),
        start_paused: vmi.spec.start_strategy.as_deref() == Some("Paused"),
        notes,
    })
}
