//! Assembles the plan of a VM from its parts.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::disk::{DiskPlan, ScsiController};
use super::types::{PodResources, VmPlan, WatchdogAction};
use super::{boot, credentials, disks, io_threads, machine, nics, volume_source};
use crate::field::FieldError;
use crate::load::Vmi;
use crate::types::Feature;
use crate::validate::{validate, warnings};

/// Default grace period in seconds.
const GRACE_PERIOD: u64 = 30;

/// Plans the VM of a VMI. A VMI that does not validate has no plan.
///
/// Opens nothing, so paths in the plan may not exist.
///
/// # Errors
/// The errors of [`validate`]; if there are none, those of missing or wrong resources of the caller.
pub fn plan(vmi: &Vmi, resources: &PodResources) -> Result<VmPlan, Vec<FieldError>> {
    validate(vmi)?;
    let mut errors = Vec::new();
    let mut warnings = warnings(vmi);

    let domain = &vmi.spec.domain;
    let devices = &domain.devices;
    let uuid = domain.firmware.uuid.as_deref().filter(|uuid| !uuid.is_empty());
    let uuid = uuid
        .and_then(|uuid| Uuid::parse_str(uuid).ok())
        .unwrap_or(resources.uuid);
    let topology = machine::topology(vmi, &mut errors);
    let memory = machine::memory(vmi, &mut errors);
    let rtc_offset_seconds = machine::rtc_offset(vmi, resources.now_unix_seconds, &mut errors);
    let vhost_vsock_cid = machine::vhost_vsock_cid(vmi, &mut errors);
    let queues = if devices.block_multi_queue {
        topology.vcpus()
    } else {
        1
    };
    let mut disks = disks::plan(vmi, uuid, queues, resources, &mut errors);
    io_threads::assign(vmi, topology, &mut disks);
    let credentials = credentials::plan(vmi, resources, &mut errors);
    let boot = boot::plan(vmi, &disks, resources, &mut errors, &mut warnings);
    if !errors.is_empty() {
        return Err(errors);
    }
    Ok(VmPlan {
        name: vmi.name.clone(),
        namespace: vmi.namespace.clone(),
        hostname: volume_source::host_name(vmi),
        subdomain: vmi.spec.subdomain.clone().filter(|name| !name.is_empty()),
        uid: vmi.uid.clone(),
        uuid,
        serial: domain.firmware.serial.clone().filter(|serial| !serial.is_empty()),
        topology,
        memory,
        scsi: (!devices.disable_hotplug || disks.iter().any(DiskPlan::is_scsi))
            .then_some(ScsiController { queues }),
        disks,
        new_image_bytes: new_image_bytes(vmi),
        nics: nics::plan(vmi, topology),
        boot,
        rng: devices.rng.is_some(),
        watchdog: devices.watchdog.as_ref().and_then(|watchdog| {
            WatchdogAction::named(watchdog.i6300esb.action.as_deref().unwrap_or_default())
        }),
        vhost_vsock_cid,
        downward_metrics: devices.downward_metrics.is_some(),
        balloon: devices.autoattach_mem_balloon.unwrap_or(true),
        serial_console: devices.autoattach_serial_console.unwrap_or(true),
        acpi: domain.features.acpi.as_ref().is_none_or(Feature::is_on),
        rtc_offset_seconds,
        grace_period_seconds: vmi.spec.termination_grace_period_seconds.unwrap_or(GRACE_PERIOD),
        credentials,
        start_paused: vmi.spec.start_strategy.as_deref() == Some("Paused"),
        warnings,
    })
}

/// Sizes of the images to create. KubeVirt creates none for volumes that are hotplugged or `ephemeral`.
fn new_image_bytes(vmi: &Vmi) -> BTreeMap<String, u64> {
    let volumes = vmi.spec.volumes.iter();
    let created = volumes.filter(|volume| {
        let claim = volume.persistent_volume_claim.is_some() || volume.data_volume.is_some();
        claim && !volume.is_hotpluggable()
    });
    let sizes = created.filter_map(|volume| {
        let size = vmi.claims.get(&volume.name)?;
        Some((volume.name.clone(), size.new_image_bytes()))
    });
    sizes.collect()
}
