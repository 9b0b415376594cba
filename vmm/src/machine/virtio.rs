//! The virtio devices of a machine, in slot order: NICs first, because guests name them by their slots, so that one more
//! disk renames none; then disks in the manifest's order; the SCSI controller last.

use std::sync::Arc;

use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::balloon::{Balloon, BalloonHandle};
use husk_devices::virtio::rng::Rng;
use husk_disk::EngineKind;
use husk_virtio_blk::{Blk, BlkHandle, BlkSetup};
use husk_virtio_net::NetSetup;
use husk_virtio_scsi::{NewUnit, ScsiHandle, VirtioScsi};

use super::nics::Nic;
use super::{EventFn, MachineError, VmEvent};

/// Distance of one device's BAR from the next.
pub const BAR_STRIDE: u64 = 1 << 20;

/// The SCSI controller's last target. A driver that finds nothing on any of them has sent as many requests, and one
/// more.
const MAX_TARGET: u8 = 255;

/// A virtio-blk disk, opened.
#[derive(Debug)]
pub struct BlkDisk {
    /// The volume's name.
    pub id: String,
    /// Its image.
    pub image: husk_disk::Disk,
    /// Serial number shown to the guest, may be empty.
    pub serial: String,
    /// Virtqueues, each with a ring and a worker thread: more than vCPUs only cost memory.
    pub queues: u16,
}

/// Which devices there are.
pub(super) struct DevicePlan {
    /// In slot order, as are disks.
    pub nics: Vec<NetSetup>,
    pub disks: Vec<BlkDisk>,
    pub rng: bool,
    /// A balloon, and whether it reports free pages.
    pub balloon: Option<bool>,
    /// On the SCSI controller, which there always is.
    pub scsi: Vec<NewUnit>,
    pub vcpus: u32,
}

pub(super) struct VirtioDevices {
    /// The first ones are those of `nics`.
    pub devices: Vec<Box<dyn VirtioDevice>>,
    pub nics: Vec<Nic>,
    pub disks: Vec<BlkHandle>,
    pub scsi: ScsiHandle,
    pub balloon: Option<BalloonHandle>,
}

pub(super) fn build(plan: DevicePlan, event: &EventFn) -> Result<VirtioDevices, MachineError> {
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    let (mut nics, mut handles) = (Vec::new(), Vec::new());
    for setup in plan.nics {
        let (net, mut nic) = Nic::make(setup)?;
        devices.push(net);
        nic.slot = u8::try_from(devices.len()).unwrap_or(u8::MAX);
        nics.push(nic);
    }
    for disk in plan.disks {
        let (id, event) = (disk.id.clone(), event.clone());
        let (blk, handle) = Blk::new(BlkSetup {
            id: disk.id,
            disk: disk.image,
            serial: disk.serial,
            queues: disk.queues,
            engine: EngineKind::Auto,
            on_io_stop: Arc::new(move |error| {
                event(VmEvent::DiskStopped {
                    disk: id.clone(),
                    error: error.to_string(),
                });
            }),
        })?;
        devices.push(Box::new(blk));
        handles.push(handle);
    }
    if plan.rng {
        devices.push(Box::new(Rng::new()));
    }
    let balloon = plan.balloon.map(|reporting| {
        let (device, handle) = Balloon::new(reporting);
        devices.push(Box::new(device));
        handle
    });
    // Last, so that the slots of the others do not depend on it.
    let event = event.clone();
    let (controller, scsi) = VirtioScsi::new(husk_virtio_scsi::ScsiConfig {
        queues: u16::try_from(plan.vcpus).unwrap_or(u16::MAX),
        max_target: MAX_TARGET,
        units: plan.scsi,
        engine: EngineKind::Auto,
        on_io_error: Arc::new(move |disk, error| {
            event(VmEvent::DiskStopped {
                disk: disk.to_owned(),
                error: error.to_string(),
            });
        }),
    })?;
    devices.push(Box::new(controller));
    if devices.len() > 31 {
        return Err(MachineError::Slots(devices.len()));
    }
    Ok(VirtioDevices {
        devices,
        nics,
        disks: handles,
        scsi,
        balloon,
    })
}
